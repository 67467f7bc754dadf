"""Shards that go through a model together in a captured step: the bits that each has alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.backends.torch.capture import SIDE_BY_SIDE_BYTES, WarmUp
from lockstep.backends.torch.stacked import StackedTensor
from lockstep.replicas import shards_together
from lockstep.replicas.module_capture import CapturableModuleReplica

SETTINGS = {"data": "fashion-mnist-mini", "num_epochs": 2, "batch_size": 300, "lr": 0.1, "quiet": True}


class Residual(nn.Module):
    """Like a small ResNet. `last` is called with its output."""

    def __init__(self, last=None, norm=nn.BatchNorm2d):
        super().__init__()
        self.stem, self.middle = nn.Conv2d(1, 6, 5, stride=2), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(6), norm(6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.classify, self.last = nn.Linear(6, 10), last or nn.Identity()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, X):
        Y = F.relu(self.norm1(self.stem(X)), inplace=True)
        Y = F.max_pool2d(Y, 2)
        Y = Y + self.scale * self.norm2(self.middle(Y))
        return self.last(self.classify(Y.mean(dim=(2, 3))))


def loss(output, y):
    return F.cross_entropy(output, y, reduction="none")


@pytest.fixture
def groups(monkeypatch):
    """The sizes of the groups that are computed, where a group is worth it in any case."""
    found, compute = [], CapturableModuleReplica._leaves_together
    monkeypatch.setattr(shards_together, "MIN_SHARE", 0)

    def noted(self, shards, samples):
        found.append(len(shards))
        return compute(self, shards, samples)

    monkeypatch.setattr(CapturableModuleReplica, "_leaves_together", noted)
    return found


def assert_same_run(**how):
    found = lockstep.train(**{**SETTINGS, **how}, loss=loss)
    alone = lockstep.train(loss=loss, **{**SETTINGS, **how, "devices": "cpu:0,cpu:1", "capture": False})
    assert found.weights_sha256 == alone.weights_sha256
    assert found.buffers_sha256 == alone.buffers_sha256
    assert [done.train_loss for done in found.history] == [done.train_loss for done in alone.history]


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1,cpu:2"])
@pytest.mark.parametrize("kind", ["capture", "rank_capture"])
def test_shards_together_have_the_bits_that_they_have_alone(request, groups, kind, devices):
    capture = request.getfixturevalue(kind)
    assert_same_run(model=Residual, momentum=0.9, devices=devices)
    assert set(groups) == {2}
    assert len(groups) >= capture.num_replayed  # not only once, when they were tried


def test_many_shards_are_four_groups(capture, groups):
    assert_same_run(model=Residual, devices="cpu:0", num_shards=20)
    assert max(groups) == 5  # 20 shards of 15 samples


class FromTheHost(nn.Module):
    def forward(self, X):
        return X * (2.0 if float(X.detach().sum()) > 0 else 1.5)


class Another(nn.Module):
    """Computes another thing for several shards at once, as a wrong kernel would."""

    def forward(self, X):
        return X * 1.0001 if isinstance(X, StackedTensor) else X


def with_a_head_of_zeros():
    model = Residual()
    nn.init.zeros_(model.classify.weight)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Residual(nn.Dropout(0.1)),
        lambda: Residual(FromTheHost()),
        lambda: Residual(Another()),
        lambda: Residual(norm=lambda channels: nn.BatchNorm2d(channels, momentum=None)),
        lambda: Residual(norm=lambda channels: nn.InstanceNorm2d(channels, track_running_stats=True)),
    ],
    ids=["dropout", "host", "bits", "mean of all", "instance norm"],
)
def test_shards_that_cannot_go_together_go_one_by_one(capture, groups, make):
    assert_same_run(model=make, devices="cpu:0")
    assert len(groups) <= 3  # they were tried, once for each size of shard
    assert capture.num_replayed


def test_gradients_of_zeros_tell_nothing(capture, groups):
    assert_same_run(model=with_a_head_of_zeros, devices="cpu:0", batch_size=400)
    assert not groups


def test_shards_go_one_by_one_where_little_is_gained(capture, groups, monkeypatch):
    monkeypatch.setattr(shards_together, "MIN_SHARE", 3)  # on a CPU, convolutions have no kernel for several shards
    assert_same_run(model=Residual, devices="cpu:0")
    assert len(groups) <= 3


def test_large_groups_have_streams_by_the_memory_of_the_gpu():
    def streams(num_bytes, num_shards, total=128 << 30):
        warm_up = WarmUp(total)
        for _ in range(4):
            warm_up.add(num_bytes, num_shards)
        return warm_up.num_streams()

    assert streams(SIDE_BY_SIDE_BYTES // 4, 1) == 16
    assert streams(SIDE_BY_SIDE_BYTES, 1) == 2
    assert streams(4 << 30, 2) == 16  # four groups, an eighth of the memory
    assert streams(5 << 30, 2) == 2
    assert streams(5 << 30, 2, total=256 << 30) == 16
