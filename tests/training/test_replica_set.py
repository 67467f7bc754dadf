"""Replicas that hold parts of the model: weights and states, drift and evaluation over all of them."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.data.batch import Batch
from lockstep.parallel.combined import StageShape
from lockstep.partition.grid import Grid
from lockstep.partition.placement import Placement
from lockstep.replicas.replica import Evaluated, ReplicaState
from lockstep.training.drift import find_drift
from lockstep.training.evaluate import EvalSpec, evaluate_batches
from lockstep.training.replica_set import ReplicaSet

FIRST, SECOND, ALL = range(0, 2), range(2, 5), range(0, 5)
STAGES = {(0,): FIRST, (1,): SECOND, (0, 1): ALL}  # the entries of stages
TWO_STAGES = Placement(Grid(data=2, network=2), stages=(0, 1))  # two replicas of each part
NAMES = [f"W{entry}" for entry in ALL]


class Part:
    """A replica that holds some stages; entry number n is the parameter Wn."""

    def __init__(self, entries, rank=0, updated=None):
        self.entries, self.rank, self.updated = entries, rank, entries if updated is None else updated
        self.weights = {f"W{entry}": np.full(2, entry, np.float32) for entry in entries}
        self.owned, self.measured = [range(3), range(3, 5)], []

    def arrays(self):
        return self.weights

    def state_dict(self):
        units = {f"optimizer/W{entry}": self.rank for entry in self.updated}
        return ReplicaState(units, {"lr": 0.1} if self.updated else {})

    def fingerprints(self):
        return {name: array.tobytes().hex() for name, array in self.weights.items()}

    def is_finite(self):
        return all(np.isfinite(array).all() for array in self.weights.values())

    def evaluate(self, X, y):
        self.measured += list(X)
        return Evaluated({"accuracy": [float((y == X % 2).sum()), len(X)], "loss": [float(X.sum()), len(X)]})


class AllRanks(NamedTuple):
    """An engine whose ranks are all in this process."""

    num_ranks: int

    @property
    def local_ranks(self):
        return range(self.num_ranks)

    @property
    def devices(self):
        return [Device(f"cpu:{rank}") for rank in self.local_ranks]

    def all_gather(self, values):
        return values

    def each(self, phase, work, *lists):
        return [work(rank, self.devices[rank], *(entries[rank] for entries in lists)) for rank in self.local_ranks]


def placed(placement):
    """The replicas of all ranks, in one process."""
    parts = [STAGES[placement.part_of(rank).stages] for rank in range(placement.grid.num_ranks)]
    replicas = [Part(part, rank) for rank, part in enumerate(parts)]
    return ReplicaSet(AllRanks(len(replicas)), replicas, placement, NAMES)


def on_one_rank(engine, placement=TWO_STAGES):
    """The replica of one rank, in a process of its own. Those of the later ranks have other values."""
    (rank,) = engine.local_ranks
    replica = Part(STAGES[placement.part_of(rank).stages], rank)
    if rank >= 2:
        replica.weights = {name: array + 100 for name, array in replica.weights.items()}
    return ReplicaSet(engine, [replica], placement, NAMES)


def test_the_model_is_merged_from_the_owners_of_its_parts_on_every_rank(on_ranks):
    found, _ = on_ranks(4, lambda engine: (on_one_rank(engine).weights(), on_one_rank(engine).state()))
    for weights, state in found:
        assert list(weights) == NAMES
        assert all((weights[f"W{entry}"] == entry).all() for entry in ALL), "those of ranks 0 and 1"
        assert state.units == {f"optimizer/W{entry}": int(entry in SECOND) for entry in ALL}
        assert state.common == {"lr": 0.1}


def test_the_local_part_is_read_without_the_other_ranks(on_ranks):
    found, _ = on_ranks(4, lambda engine: (on_one_rank(engine).local_weights(), on_one_rank(engine).local_state()))
    assert [list(weights) for weights, _ in found] == [NAMES[:2], NAMES[2:]] * 2
    assert [list(state.units) for _, state in found] == [[f"optimizer/{n}" for n in NAMES[:2]],
                                                         [f"optimizer/{n}" for n in NAMES[2:]]] * 2  # fmt: skip
    assert set(found[3][1].units.values()) == {3}


@pytest.mark.parametrize("stages", [(0, 1), (1, 0)])
def test_a_process_with_several_ranks_has_each_part_once_in_model_order(stages):
    replicas = placed(Placement(Grid(network=2), stages))
    assert list(replicas.local_weights()) == list(replicas.weights()) == NAMES
    assert replicas.local_state().units == replicas.state().units
    assert replicas.state().units["optimizer/W2"] == stages.index(1)


def test_a_model_that_every_rank_holds_is_read_without_a_collective():
    class NoCollectives(AllRanks):
        def all_gather(self, values):
            raise AssertionError("every rank has everything")

    replicas = ReplicaSet(NoCollectives(2), [Part(ALL, 0), Part(ALL, 1)])
    assert replicas.placement == Placement(Grid(data=2))
    assert list(replicas.weights()) == list(replicas.local_weights()) == NAMES
    assert set(replicas.state().units.values()) == set(replicas.local_state().units.values()) == {0}
    assert replicas.is_finite()


def test_the_state_of_a_shared_update_is_merged_from_all_ranks_and_one_may_own_nothing():
    placement = Placement(Grid(data=3), shards_update=True)
    local = [Part(ALL, 0, range(3)), Part(ALL, 1, range(0)), Part(ALL, 2, range(3, 5))]
    replicas = ReplicaSet(AllRanks(3), local, placement, NAMES)
    assert list(replicas.state().units.values()) == [0, 0, 0, 2, 2]
    assert replicas.state().common == {"lr": 0.1}
    assert replicas.state() == replicas.local_state()


def test_a_stage_that_is_not_finite_is_seen_on_every_rank(on_ranks):
    def is_finite(engine):
        replicas = on_one_rank(engine)
        if engine.local_ranks[0] == 1:
            replicas.local[0].weights["W2"][0] = np.nan
        return replicas.is_finite()

    assert on_ranks(4, is_finite)[0] == [False] * 4


@pytest.mark.parametrize("shards_update", [False, True])
def test_every_rank_knows_the_shapes_of_all_parts(on_ranks, shards_update):
    placement = TWO_STAGES._replace(shards_update=shards_update)
    found, _ = on_ranks(4, lambda engine: on_one_rank(engine, placement).shapes())
    owned = (range(3), range(3, 5)) if shards_update else ()
    assert found == [((StageShape(0, FIRST, owned),), (StageShape(1, SECOND, owned),))] * 4


# --- drift


def test_only_ranks_with_the_same_part_are_compared():
    assert find_drift(placed(TWO_STAGES)) is None
    single = placed(Placement(Grid(network=2), (0, 1)))  # nothing to compare with
    single.local[1].weights["W3"] += 1
    assert find_drift(single) is None


def test_the_rank_that_differs_from_the_others_of_its_part_is_named():
    replicas = placed(Placement(Grid(data=3, network=2), (0, 1)))
    replicas.local[5].weights["W3"] += 1
    replicas.local[5].weights["W4"] += 1
    assert find_drift(replicas) == ("rank 5 (cpu:5), first in W3", True, 1)


def test_of_two_replicas_of_a_part_nobody_knows_which_is_right():
    replicas = placed(TWO_STAGES)
    replicas.local[3].weights["W2"] += 1
    named, has_majority, good = find_drift(replicas)
    assert named == "rank 3 (cpu:3), first in W2"
    assert not has_majority
    assert good == 1, "the first rank of the same part"


def test_drift_is_found_on_every_rank(on_ranks):
    found, _ = on_ranks(4, lambda engine: find_drift(on_one_rank(engine)))
    assert found == [("rank 2 (cpu:2), first in W0", False, 0)] * 4


# --- evaluation


@pytest.mark.parametrize("num_samples", [1, 10, 37])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_sample_is_counted_once(num_ranks, num_samples):
    replicas = placed(Placement(Grid(data=num_ranks), stages=(0, 0)))
    X = np.arange(num_samples)
    batch = Batch(num_samples, lambda rank, start, stop: (X[start:stop], np.zeros(stop - start)))
    metrics = evaluate_batches(replicas, [batch], EvalSpec(batch_size=4))
    assert sorted(sample for replica in replicas.local for sample in replica.measured) == list(range(num_samples))
    assert metrics == {"accuracy": -(-num_samples // 2) / num_samples, "loss": X.sum() / num_samples}


def test_a_callback_of_one_rank_cannot_evaluate_a_model_that_is_on_several():
    alone = SimpleNamespace(num_ranks=2, local_ranks=range(1))
    replicas = ReplicaSet(alone, [Part(FIRST)], Placement(Grid(network=2), (0, 1)))
    with pytest.raises(RunError, match=r"^A callback is called on one rank, and the model is split between several.*"):
        evaluate_batches(replicas, [], EvalSpec(4), is_alone=True)
