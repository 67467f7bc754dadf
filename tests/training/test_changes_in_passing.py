"""Models and losses that change something in passing: it has no effect on the bits, or it is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep

generator = torch.Generator().manual_seed(0)
X, y = torch.rand(48, 12, generator=generator), torch.randint(4, (48,), generator=generator)
SHORT = {"batch_size": 16, "shards": 4, "epochs": 2, "lr": 0.1, "quiet": True}
SPLITS = [{"split": "network=2"}, {"split": "layers=2", "slices": 3}, {"devices": 2, "update": "sharded"}]


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, X):
        return self.last(self.first(X))


def trained(model=TwoLayers, **how):
    return lockstep.train(model=model, data=((X, y), (X, y)), **{**SHORT, **how})


def check_refused(model, how, match):
    with pytest.raises(lockstep.LockstepError, match=match):
        trained(model, **how)


@pytest.mark.parametrize("what", ["output", "target"])
def test_a_loss_may_write_in_place_to_what_it_gets(what):
    def loss(output, y):
        if what == "output":
            output.div_(0.5)
        else:
            y.add_(1).remainder_(4)
        return F.cross_entropy(output, y, reduction="none")

    assert len({trained(loss=loss, devices=k).weights_sha256 for k in (1, 2, 3)}) == 1


class Scales(TwoLayers):
    """Writes to a buffer, multiplies by it at once, and once more at the end."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, X):
        self.scale.mul_(0.99)
        return self.last(self.first(X) * self.scale) * self.scale.mean()


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_a_buffer_that_is_written_to_may_be_used_on_both_sides_of_a_cut(order):
    whole, cut = trained(Scales, devices=1), trained(Scales, split="network=2", stages="last", pipeline=order)
    assert (cut.weights_sha256, cut.buffers_sha256, cut.metrics) == (
        whole.weights_sha256, whole.buffers_sha256, whole.metrics
    )  # fmt: skip


class FrozenBackbone(TwoLayers):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8).eval()

    def forward(self, X):
        return self.last(self.norm(self.first(X)))


def test_a_part_in_eval_mode_may_be_in_any_stage():
    expected = trained(FrozenBackbone, devices=1)
    for stages in ("norm", "last"):
        found = trained(FrozenBackbone, split="network=2", stages=stages)
        assert (found.weights_sha256, found.buffers_sha256) == (expected.weights_sha256, expected.buffers_sha256)


class Teacher(TwoLayers):
    """Keeps an average of a layer in one that is frozen."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(12, 8).requires_grad_(False)

    def forward(self, X):
        with torch.no_grad():
            for average, weight in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                average.lerp_(weight, 0.1)
        return self.last(self.first(X) + self.teacher(X))


class KeepsLast(TwoLayers):
    """Adds what it has seen in the shard before."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def forward(self, X):
        hidden = self.first(X)
        before, self.seen = 0 if self.seen is None else self.seen.mean(), hidden.detach()
        return self.last(hidden + before)


class Counts(TwoLayers):
    def __init__(self):
        super().__init__()
        self.number = 0

    def forward(self, X):
        self.number += 1
        return super().forward(X) * (1 + self.number % 3)


@pytest.mark.parametrize("split", [{"devices": 1}, *SPLITS], ids=str)
@pytest.mark.parametrize("model", [Teacher, KeepsLast, Counts])
def test_a_model_that_keeps_something_is_refused_however_it_is_split(model, split):
    check_refused(model, split, r"teacher\.weight|seen|number|same bits")


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_loss_that_keeps_something_is_refused_however_the_model_is_split(split):
    class Running:
        def __init__(self):
            self.mean = 0.0

        def __call__(self, output, y):
            losses = F.cross_entropy(output, y, reduction="none")
            self.mean = 0.9 * self.mean + 0.1 * float(losses.detach().mean())
            return losses * (1 + self.mean)

    with pytest.raises(lockstep.LockstepError, match=r"the loss's mean|other samples"):
        trained(loss=Running(), **split)


def test_a_module_is_not_changed_by_looking_where_it_can_be_cut():
    for model in (Teacher(), Counts()):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        check_refused(
            model, {"split": "network=2"}, "cannot be cut into stages: .* (writes to its parameter|changes its attr)"
        )
        assert getattr(model, "number", 0) == 0
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class OwnGenerator(TwoLayers):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, X):
        return self.last(self.first(X) + torch.randn(8, generator=self.generator))


class TurnsGradientsOn(TwoLayers):
    def forward(self, X):
        with torch.enable_grad():
            return super().forward(X)


@pytest.mark.parametrize(
    ("model", "match"), [(OwnGenerator, "of type Generator"), (TurnsGradientsOn, "autocast or the")]
)
def test_what_stages_would_not_do_is_refused(model, match):
    check_refused(model, {"split": "network=2"}, match)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_scripted_parts_and_running_statistics_of_samples_are_refused():
    scripted = nn.Sequential(torch.jit.script(nn.Linear(12, 4)))
    check_refused(scripted, {}, "Its part 0 is TorchScript")
    norm = nn.Sequential(nn.Unflatten(1, (3, 4)), nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten(),
                         nn.Linear(12, 4))  # fmt: skip
    check_refused(norm, {"batch_norm": "sync"}, "InstanceNorm1d with running statistics needs --batch-norm shard")


class CountsInBuffer(TwoLayers):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, X):
        self.count.add_(1)
        return self.dropout(self.norm(super().forward(X)))


def seeded():
    torch.manual_seed(0)
    return CountsInBuffer()


def test_a_loss_may_read_the_parameters_of_its_own_trainer():
    def loss(output, y):
        return F.cross_entropy(output, y, reduction="none") + 0.01 * trainer.module.first.weight.pow(2).sum()

    found = set()
    for k in (1, 2, 3):
        with lockstep.Trainer(seeded(), loss=loss, devices=k, shards=4, lr=0.1) as trainer:
            for _ in range(3):
                trainer.step((X, y))
            assert int(trainer.weights()["count"]) == 12
            found.add(trainer.weights_sha256)
    assert len(found) == 1


@pytest.mark.parametrize("what", ["weights", "dropout"])
def test_a_replica_is_not_changed_alone(what):
    def change(module):
        if what == "weights":
            module.load_state_dict(best)
        else:
            module.dropout.p /= 2

    hashes = set()
    for k in (1, 2, 3):
        with lockstep.Trainer(seeded(), devices=k, shards=4, lr=0.1) as trainer:
            best = {name: value + 1 for name, value in trainer.module.state_dict().items()}
            for _ in range(7):
                trainer.step((X, y))
            trainer.apply(change)
            if what == "weights":
                assert all(torch.equal(torch.as_tensor(trainer.weights()[name]), best[name]) for name in best)
            trainer.step((X, y))
            assert int(trainer.weights()["count"]) == (5 if what == "weights" else 32)
            hashes.add(trainer.weights_sha256)
            change(trainer.module)
            with pytest.raises(
                lockstep.LockstepError, match=r"trainer\.module was changed between steps .*trainer\.apply"
            ):
                trainer.step((X, y))
    assert len(hashes) == 1
