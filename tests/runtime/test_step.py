"""P1, same bits: the weights do not depend on the number of devices, the exchange, or who works on which shard."""

import math

import numpy as np
import pytest

from lockstep.backends import load_backend
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.layout import layout_of
from lockstep.data.batch import Batch
from lockstep.models import CrossEntropySum
from lockstep.models.lenet import init_lenet, lenet
from lockstep.optim.optimizers import Sgd
from lockstep.partition.balance import Balance
from lockstep.partition.batch import split_into_shards
from lockstep.replicas.flat import FlatReplica, FlatTrainSpec
from lockstep.runtime.inprocess import InProcess
from lockstep.runtime.step import StepOptions, train_step
from lockstep.schedules.reduction_tree import Node, sum_of
from lockstep.training.run import run

TORCH = load_backend("torch")


def result_of(config: RunConfig):
    return run(config, quiet=True)


# (data, batch size): a full batch and a short one; uneven shards; fewer samples than shards, also in the last batch
CASES = [("tiny", 256), ("tiny", 100), ("few", 24), ("few", 7), ("few", 1)]


@pytest.fixture(scope="module")
def one_device(tiny, few):
    """The weights that one device ends with; the others must find the same."""
    paths = {"tiny": str(tiny), "few": str(few)}

    def weights(data, batch_size, **settings):
        config = RunConfig(**{"data": paths[data], "num_epochs": 2, "batch_size": batch_size, **settings})
        return result_of(config).weights_sha256

    known = {case: weights(*case, devices=1) for case in CASES}
    return weights, known


@pytest.mark.parametrize(("data", "batch_size"), CASES)
@pytest.mark.parametrize("exchange", ["gather", "sharded", "tree"])
@pytest.mark.parametrize("k", range(1, 9))
def test_any_number_of_devices_and_any_exchange_give_the_same_bits(one_device, k, exchange, data, batch_size):
    weights, known = one_device
    assert weights(data, batch_size, devices=k, exchange=exchange) == known[data, batch_size]


def test_losses_and_accuracies_are_the_same_too(tiny):
    def history(k):
        return [
            (done.train_loss, done.test_accuracy)
            for done in result_of(RunConfig(data=str(tiny), devices=k, num_epochs=2, batch_size=30)).history
        ]

    assert history(1) == history(3) == history(8)


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"num_shards": 4}, {"learning_rate": 0.1}, {"batch_size": 101}],
    ids=lambda c: next(iter(c)),
)
def test_what_is_part_of_the_run_changes_the_bits(one_device, changed):
    weights, known = one_device
    assert weights(**{"data": "tiny", "batch_size": 100, "devices": 2, **changed}) != known["tiny", 100]


def batch_of(num_samples: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, Batch]:
    random = np.random.RandomState(3)
    X = (scale * random.standard_normal((num_samples, 1, 28, 28))).astype(np.float32)
    y = random.randint(0, 10, num_samples)
    X_, y_ = (TORCH.from_numpy(array, Device("cpu")) for array in (X, y))

    def fetch(rank, start, stop):
        return TORCH.copy_to(X_[start:stop], Device("cpu")), TORCH.copy_to(y_[start:stop], Device("cpu"))

    return X, y, Batch(num_samples, fetch)


def one_step(num_ranks, num_samples=50, num_shards=8, exchange="sharded", balance=None):
    """Every rank's parameters after one step from initial weights that are large enough to matter."""
    params = {name: 10 * array for name, array in init_lenet(0).items()}
    layout = layout_of(params)
    devices = [Device(f"cpu:{rank}") for rank in range(num_ranks)]
    _, _, batch = batch_of(num_samples)
    with InProcess(TORCH, devices) as engine:
        spec, start = FlatTrainSpec(TORCH, lenet, layout, Sgd(0.5)), layout.flatten(list(params.values()))
        replicas = [FlatReplica(spec, TORCH.from_numpy(start.copy(), device)) for device in devices]
        train_step(engine, replicas, StepOptions(num_shards, exchange), balance or Balance(), 1, batch)
        return [TORCH.to_numpy(replica.flat) for replica in replicas]


@pytest.mark.parametrize("exchange", ["gather", "sharded", "tree", "ring"])
def test_every_replica_gets_the_same_update(exchange):
    first, *others = one_step(5, exchange=exchange)
    for other in others:
        np.testing.assert_array_equal(first, other)


class Unequal(Balance):
    """The first rank gets `first` of the shards, the other the rest."""

    def __init__(self, first):
        self.first = first

    def ranges(self, num_shards, num_ranks):
        return range(self.first), range(self.first, num_shards)


@pytest.mark.parametrize("first", [0, 1, 7])
@pytest.mark.parametrize("exchange", ["gather", "sharded", "tree"])
def test_any_assignment_of_shards_to_devices_gives_the_same_bits(first, exchange):
    (alone,) = one_step(1)
    for replica in one_step(2, exchange=exchange, balance=Unequal(first)):
        np.testing.assert_array_equal(alone, replica)


def test_the_step_adds_leaves_in_the_tree_and_divides_once():
    """Every gradient by itself, added up by hand in numpy, in the tree's brackets."""
    num_samples, num_shards = 50, 8
    params = {name: 10 * array for name, array in init_lenet(0).items()}
    layout = layout_of(params)
    flat = layout.flatten(list(params.values()))
    _, _, batch = batch_of(num_samples)
    shards = split_into_shards(num_samples, num_shards)
    with InProcess(TORCH, [Device("cpu:0")]) as engine:

        def gradient(rank, device, number):
            X, y = batch.fetch(0, shards[number].start, shards[number].stop)
            parameters = TORCH.from_numpy(flat, device)
            return TORCH.to_numpy(TORCH.value_and_grad(CrossEntropySum(lenet), layout, parameters, X, y)[1])

        leaves = [engine.each("leaf", gradient, [number])[0] for number in range(num_shards)]
    total = sum_of(Node(0, num_shards), leaf=leaves.__getitem__, add=np.add)
    expected = flat - np.float32(0.5) * (total / np.float32(num_samples))
    (replica,) = one_step(1, num_samples, num_shards)
    np.testing.assert_array_equal(replica, expected)

    in_a_row = leaves[0]
    for leaf in leaves[1:]:
        in_a_row = in_a_row + leaf
    assert (in_a_row != total).any(), "the brackets must matter, or this test shows nothing"


def test_ring_agrees_within_rounding_and_not_in_every_bit():
    tree, ring = one_step(4)[0], one_step(4, exchange="ring")[0]
    np.testing.assert_allclose(ring, tree, rtol=0, atol=1e-5)
    assert (ring != tree).any(), "ring adds in an order of its own"


def test_ring_over_a_whole_run_stays_close(tiny):
    settings = {"data": str(tiny), "devices": 3, "num_epochs": 2, "batch_size": 20}
    sharded = result_of(RunConfig(**settings))
    ring = result_of(RunConfig(**settings, exchange="ring"))
    for name, array in sharded.params.items():
        np.testing.assert_allclose(ring.params[name], array, rtol=0, atol=1e-5)


def test_uneven_shards_weigh_samples_not_means():
    """P2: seven samples in five shards (2, 2, 1, 1, 1) give the mean over samples, not a mean of means."""
    (uneven,), (whole,) = one_step(1, num_samples=7, num_shards=5), one_step(1, num_samples=7, num_shards=1)
    np.testing.assert_allclose(uneven, whole, rtol=0, atol=1e-6)


def test_the_training_loss_counts_every_sample_once(tiny):
    config = RunConfig(data=str(tiny), devices=3, num_epochs=1, batch_size=32, learning_rate=1e-12)
    (epoch,) = run(config, quiet=True).history
    assert math.isclose(epoch.train_loss, math.log(10), rel_tol=1e-3), "all classes are alike to untrained weights"
