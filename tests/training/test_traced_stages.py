"""Stages compute what the module does: whatever tracing does not see is found, and refused before the run."""

import time
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.training import module_split
from training.split_models import seeded

generator = torch.Generator().manual_seed(0)
LABELS = torch.randint(3, (40,), generator=generator)
VECTORS = torch.rand(40, 6, generator=generator), LABELS
SEQUENCES = torch.rand(40, 7, 6, generator=generator), LABELS
IMAGES = torch.rand(40, 3, 8, 8, generator=generator), LABELS


def trained(make, data, **how):
    settings = {"epochs": 2, "batch_size": 20, "shards": 4, "lr": 0.1, "quiet": True}
    found = lockstep.train(model=seeded(make), data=(data, data), **settings, **how)
    return found.weights_sha256, found.buffers_sha256, found.metrics


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.last = (
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 3)
        )  # fmt: skip

    def forward(self, X):
        return self.last(F.dropout(self.second(self.norm(self.first(X)).relu()), 0.4, self.training))


class FrozenNorm(Net):
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class OptionalState(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.recurrent, self.last = nn.Linear(6, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)
        self.start = nn.Parameter(torch.ones(1, 1, 8))

    def forward(self, X, state=None, *, features=False):
        X = self.first(X)
        if state is None:
            state = self.start.expand(1, X.shape[0], 8).contiguous()
        hidden = self.recurrent(X, state)[0][:, 0]
        return hidden if features else self.last(hidden)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, X):
        return checkpoint(self.block, X, use_reentrant=False)


def with_checkpoints():
    return nn.Sequential(nn.Conv2d(3, 8, 3), Checkpointed(), Checkpointed(), nn.Flatten(), nn.Linear(288, 3))


class FirstOfSequence(nn.Module):
    """A tensor with gaps in memory crosses the cut, and an expanded one."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 33), nn.BatchNorm1d(33), nn.Linear(33, 3)

    def forward(self, X):
        hidden = self.first(X)
        wide = hidden.mean((1, 2)).unsqueeze(1).expand(-1, 33)
        return self.last(self.norm(hidden[:, 0]) + wide / wide.sum(1, keepdim=True))


class WritesToFirst(FirstOfSequence):
    """In place, to a tensor with gaps that has crossed the cut."""

    def forward(self, X):
        hidden = self.first(X)[:, 0]
        hidden = self.norm(hidden * 2) + hidden.mul_(0.5)
        return self.last(hidden)


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Linear(8, 3)

    def forward(self, X):
        hidden = self.first(X)[:, :, ::2, ::2]
        return self.last(self.second(hidden).relu().mean((2, 3)) + hidden.mean((2, 3)))


class AsksForAutocast(Net):
    def forward(self, X):
        hidden = self.first(X)
        if torch.is_autocast_enabled("cpu"):
            hidden = hidden.float() * 1.5
        return self.last(self.second(hidden).relu())


class LowRank(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base, self.more = nn.Linear(inputs, outputs), nn.Parameter(torch.randn(outputs, 1))

    def forward(self, X):
        return F.linear(X, self.base.weight + self.more, self.base.bias)


class OtherInEvalMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, X):
        if self.training:
            return self.second(self.first(X).relu())
        with torch.inference_mode():
            return self.second(self.first(X).relu())


SAME = {
    "a train method of its own": (FrozenNorm, VECTORS, {}),
    "in eval mode": (lambda: Net().eval(), VECTORS, {}),
    "arguments that are not given": (OptionalState, SEQUENCES, {}),
    "checkpointed norm layers": (with_checkpoints, IMAGES, {}),
    "gaps and expanded": (FirstOfSequence, SEQUENCES, {"stages": "norm"}),
    "writes to gaps": (WritesToFirst, SEQUENCES, {"stages": "norm"}),
    "strided": (Strided, IMAGES, {"stages": "second"}),
    "asks for autocast": (AsksForAutocast, VECTORS, {"precision": "bf16"}),
    "weights of children": (lambda: nn.Sequential(*(LowRank(n, m) for n, m in ((6, 9), (9, 9), (9, 3)))), VECTORS, {}),
    "other in eval mode": (
        lambda: nn.Sequential(nn.Linear(6, 16), OtherInEvalMode(), nn.Linear(16, 3)), VECTORS, {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_stages_give_the_bits_of_the_whole(case):
    make, data, how = SAME[case]
    whole = trained(make, data, devices=2, **{n: value for n, value in how.items() if n != "stages"})
    assert trained(make, data, split="network=2", **how) == whole


def test_gaps_cross_between_processes_too():
    make, data, how = SAME["gaps and expanded"]
    assert trained(make, data, split="network=2", engine="processes", **how) == trained(make, data, devices=1)


class AsksForType(Net):
    def forward(self, X):
        if isinstance(X, torch.Tensor):
            X = X * 2 - 1
        return super().forward(X)


class AsksForTuple(Net):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, X):
        hidden = self.first(X)
        found = self.attention(hidden, hidden, hidden)
        return self.last(self.second(found[0] if isinstance(found, tuple) else found).mean(1))


def with_forward_of_its_own():
    net = Net()
    net.forward = types.MethodType(lambda self, X: self.last(self.second(self.first(X).tanh())) * 2, net)
    return net


class Called(Net):
    def __call__(self, X):
        return super().__call__(X) * 3


class Caches(Net):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, X):
        if "positions" not in self.cache:
            self.cache["positions"] = torch.linspace(0, 1, 16)
        return self.last(self.second(self.first(X) + self.cache["positions"]).relu())


class NoAutocast(Net):
    def forward(self, X):
        with torch.autocast("cpu", enabled=False):
            hidden = self.second(self.first(X).float())
        return self.last(hidden)


@pytest.mark.parametrize(
    ("make", "data", "how", "match"),
    [
        (AsksForType, VECTORS, {}, "in training mode they would compute something else"),
        (AsksForTuple, SEQUENCES, {}, "in stages it fails"),
        (with_forward_of_its_own, VECTORS, {}, "they would compute something else"),
        (Called, VECTORS, {}, "they would compute something else"),
        (Caches, VECTORS, {}, "it changes its attribute cache"),
        (NoAutocast, VECTORS, {"precision": "bf16"}, "within torch.no_grad, autocast"),
    ],
    ids=["type", "tuple", "forward", "call", "cache", "autocast"],
)
def test_what_tracing_does_not_see_is_refused(make, data, how, match):
    with pytest.raises(lockstep.LockstepError, match=f"cannot be cut into stages.*{match}"):
        trained(make, data, split="network=2", **how)
    trained(make, data, devices=2, **how)


def test_the_users_random_numbers_are_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trained(Net, VECTORS, split="network=2")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_hook_of_a_parameter_is_refused():
    net = Net()
    net.first.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(lockstep.LockstepError, match=r"first\.weight has a hook \(register_hook\)"):
        lockstep.train(model=net, data=VECTORS, batch_size=20, epochs=1, quiet=True)


class Timed(nn.Module):
    """Its output is another each time."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, X):
        return self.last(self.first(X) * (1 + time.perf_counter() % 1))


def test_a_model_that_gives_something_else_each_time_is_refused():
    with pytest.raises(lockstep.LockstepError, match="the same samples give something else each time"):
        trained(Timed, VECTORS, split="network=2")


def test_stages_are_compared_with_one_thread(monkeypatch):
    """With several, programs that share cores take minutes for it; and some operations have other bits."""
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(module_split, "check_stages", lambda *given: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        trained(Net, VECTORS, split="network=2")
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
