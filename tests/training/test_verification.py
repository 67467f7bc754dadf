"""The promise checks itself: shards are computed again elsewhere, and what keeps a state of its own is named."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import lockstep
from lockstep.core.errors import LockstepError
from lockstep.core.this_thread import THIS_THREAD
from lockstep.replicas.hidden_state import changed, state_of
from lockstep.replicas.module import ModuleReplica

X = np.random.RandomState(0).standard_normal((96, 6)).astype(np.float32)
Y = np.arange(96) % 3
HOW = {"data": (X, Y), "batch_size": 32, "epochs": 4, "lr": 0.1, "quiet": True}


class Net(nn.Module):
    """One layer; what a shard changes is in the subclasses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, X):
        return self.layer(X) * self.factor()

    def factor(self):
        return 1.0


class Teacher(Net):
    """Frozen parameters that follow the trained ones in the forward pass."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    def forward(self, X):
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                theirs.lerp_(ours, 0.1)
        return self.layer(X) + 0.1 * self.teacher(X)


class PrivateCounter(Net):
    _calls = 0

    def factor(self):
        self._calls += 1
        return 1 + 0.001 * self._calls


class CounterInADict(Net):
    def __init__(self):
        super().__init__()
        self.kept = {"calls": [0]}

    def factor(self):
        self.kept["calls"][0] += 1
        return 1 + 0.001 * self.kept["calls"][0]


class LateFloat(CounterInADict):
    """Nothing changes in the first step."""

    scale = 1.0

    def factor(self):
        super().factor()
        if self.kept["calls"][0] > 12:
            self.scale *= 0.99
        return self.scale


class NumpyGenerator(Net):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def factor(self):
        return 1 + float(self.generator.random())


class PythonGenerator(Net):
    def __init__(self):
        super().__init__()
        self.generator = random.Random(0)

    def factor(self):
        return 1 + self.generator.random()


class Annealed:
    """A loss that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, y):
        self.calls += 1
        return F.cross_entropy(output, y, reduction="none") * (1 + 0.01 * self.calls)


def annealed_by_closure():
    calls = [0]

    def loss(output, y):
        calls[0] += 1
        return F.cross_entropy(output, y, reduction="none") * (1 + 0.01 * calls[0])

    return loss


CASES = {
    "private": (PrivateCounter, None, "the model's _calls"),
    "dict": (CounterInADict, None, "the model's kept.calls.0"),
    "late": (LateFloat, None, "the model's kept.calls"),
    "numpy": (NumpyGenerator, None, "the model's generator"),
    "python": (PythonGenerator, None, "the model's generator"),
    "loss": (Net, Annealed, "the loss's calls"),
    "closure": (Net, annealed_by_closure, "the loss's calls.0"),
}
ENGINES = [("inprocess", 1), ("inprocess", 2), ("inprocess", 3), ("processes", 1), ("processes", 2), ("processes", 3)]


@pytest.mark.parametrize(("engine", "k"), ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_a_state_that_shards_hand_on_is_named(case, engine, k):
    make, loss, name = CASES[case]
    given = {} if loss is None else {"loss": loss()}
    with pytest.raises(LockstepError) as caught:
        lockstep.train(model=make(), devices=k, engine=engine, **given, **HOW)
    assert "while a shard is computed" in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(("engine", "k"), ENGINES)
def test_a_parameter_that_the_forward_pass_changes_is_named(engine, k):
    with pytest.raises(LockstepError, match=r"changes its parameter teacher\.weight in the forward pass"):
        lockstep.train(model=Teacher(), devices=k, engine=engine, **HOW)


class Annealing:
    """A loss that counts its calls, which has an effect later."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, y):
        self.calls += 1
        return F.cross_entropy(output, y, reduction="none") * (0.5 if self.calls > 100 else 1.0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_counter_of_the_loss_is_named_before_it_has_an_effect(k):
    with pytest.raises(LockstepError, match=r"step 2: while a shard is computed, the loss's calls changes"):
        lockstep.train(model=Net(), loss=Annealing(), devices=k, **HOW)


def test_a_list_that_the_loss_appends_to_is_allowed():
    seen = []

    def loss(output, y):
        seen.append(len(y))
        return F.cross_entropy(output, y, reduction="none")

    hashes = {lockstep.train(model=Net(), loss=loss, devices=k, **HOW).weights_sha256 for k in (1, 2, 3)}
    assert len(hashes) == 1
    assert seen


class RandomFlips(torch.utils.data.Dataset):
    """A data set with a generator of its own, as some augmentation libraries have it."""

    def __init__(self):
        self.generator = random.Random(0)

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        sample = torch.from_numpy(X[number])
        return sample.flip(0) if self.generator.random() < 0.5 else sample, int(Y[number])


@pytest.mark.parametrize(("engine", "k"), [("inprocess", 1), ("inprocess", 2), ("inprocess", 3), ("processes", 2)])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_differ_each_time_they_are_loaded_are_named(engine, k, workers):
    with pytest.raises(LockstepError, match=r"Sample \d+ of the training data is another each time"):
        lockstep.train(model=Net(), devices=k, engine=engine, workers=workers, **HOW | {"data": RandomFlips()})


def test_a_net_that_writes_to_a_shared_module_gives_the_bits_of_one_device():
    module = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    names = [name for name, _ in module.named_parameters()]

    def net(X, params):
        return functional_call(module, dict(zip(names, params, strict=True)), (X,))

    torch.manual_seed(0)
    start = [torch.randn_like(param) for param in module.parameters()]
    found = set()
    for k in (1, 2, 3, 2, 3):
        devices = [f"cpu:{number}" for number in range(k)]
        params = [lockstep.get_params(start, device) for device in devices]
        for _ in range(20):
            lockstep.train_batch(torch.from_numpy(X), torch.from_numpy(Y), params, devices, lr=0.1, net=net)
        found.add(tuple(param.detach().numpy().tobytes() for param in params[0]))
    assert len(found) == 1


def flip_a_bit(monkeypatch, rank, step):
    """That rank computes one gradient with one wrong bit in that step, once."""
    original, left = ModuleReplica._leaf_of, [1]

    def leaf_of(self, shard):
        leaf = original(self, shard)
        if THIS_THREAD.rank == rank and self._step == step and left[0]:
            left[0] -= 1
            gradient = leaf.gradient.flat() if hasattr(leaf.gradient, "flat") else leaf.gradient
            gradient.view(torch.int32)[3] ^= 1 << 5
            return leaf._replace(gradient=gradient)
        return leaf

    monkeypatch.setattr(ModuleReplica, "_leaf_of", leaf_of)


@pytest.mark.parametrize(("k", "rank"), [(1, 0), (2, 1), (3, 2)])
def test_one_wrong_bit_is_found_and_its_rank_named(monkeypatch, k, rank):
    flip_a_bit(monkeypatch, rank, step=10)
    with pytest.raises(LockstepError) as caught:
        lockstep.train(model=Net(), devices=k, verify_every=5, **HOW)
    said = str(caught.value)
    assert said.startswith("step 10: shard")
    assert f"first in the gradient of layer.weight, on rank {rank} (cpu:{rank}). Nothing that the model" in said
    assert "silent data corruption" in said


@pytest.mark.parametrize(("k", "rank"), [(2, 1), (3, 0), (3, 2)])
def test_a_wrong_bit_in_the_memory_of_a_rank_is_found_and_named_by_the_next_verified_step(monkeypatch, k, rank):
    original = ModuleReplica.end_update

    def end_update(self):
        original(self)
        if THIS_THREAD.rank == rank and self._step == 17:
            self.module.layer.weight.data.view(torch.int32)[0, 3] ^= 1 << 5

    monkeypatch.setattr(ModuleReplica, "end_update", end_update)
    with pytest.raises(LockstepError) as caught:
        lockstep.train(model=Net(), devices=k, verify_every=5, **{**HOW, "epochs": 17})  # 51 steps
    which = "a replica is not equal to the others" if k == 3 else "the replicas are not equal"
    assert str(caught.value).startswith(f"step 19: {which} any more: rank {rank if k == 3 else 1} (cpu:")
    assert "first in layer.weight" in str(caught.value)


@pytest.mark.parametrize(
    "how", [{}, {"batch_norm": "sync"}, {"over": "batch", "loss": lambda o, y: F.cross_entropy(o, y)}]
)
def test_verified_steps_have_the_bits_of_others(how):
    def train(k, every):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        result = lockstep.train(
            model=model, devices=k, verify_every=every, optimizer="adam", **{**HOW, "lr": 0.01}, **how
        )
        return result.weights_sha256, result.buffers_sha256

    assert {train(k, every) for k, every in ((1, 0), (1, 2), (2, 1), (3, 4))} == {train(2, 0)}


def test_verification_of_a_stateful_loss_over_the_batch():
    loss = Annealed()
    with pytest.raises(LockstepError, match=r"the loss's loss\.calls"):
        lockstep.train(model=Net(), devices=2, over="batch", loss=lambda o, y: loss(o, y).mean(), **HOW)


def test_lenet_is_verified_in_every_framework_that_is_here():
    found = {
        lockstep.train(k, num_epochs=1, data="fashion-mnist-mini", verify_every=every, quiet=True).weights_sha256
        for k, every in ((1, 0), (2, 3))
    }
    assert len(found) == 1


def test_state_is_found_at_any_depth_and_what_stays_is_not():
    module = CounterInADict()
    before = state_of(module)
    assert changed(before, state_of(module)) == []
    module(torch.zeros(1, 6))
    assert changed(before, state_of(module)) == ["kept.calls.0"]
    module.kept["more"] = module.kept  # a cycle
    assert changed(before, state_of(module)) == ["kept.calls.0"]
