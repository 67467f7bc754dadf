"""Shards that go through a model together in a captured step: the bits that each has alone."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.replicas import shards_together
from lockstep.replicas.module_capture import CapturableModuleReplica


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 5, stride=2)
        self.norm1, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=0.3)
        self.middle = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.classify = nn.Linear(6, 10)

    def forward(self, X):
        Y = nn.functional.relu(self.norm1(self.stem(X)), inplace=True)
        Y = nn.functional.max_pool2d(Y, 2)
        Y = Y + self.scale * self.norm2(self.middle(Y))
        return self.classify(Y.mean(dim=(2, 3)))


SETTINGS = {"data": "fashion-mnist-mini", "num_epochs": 2, "batch_size": 300, "lr": 0.1, "quiet": True}


def loss(output, y):
    return nn.functional.cross_entropy(output, y, reduction="none")


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


@pytest.mark.parametrize("devices", ["cpu:0", "cpu:0,cpu:1,cpu:2"])
@pytest.mark.parametrize("kind", ["capture", "rank_capture"])
def test_shards_together_have_the_bits_that_they_have_alone(request, groups, kind, devices):
    request.getfixturevalue(kind)
    how = {**SETTINGS, "model": Residual, "loss": loss, "momentum": 0.9}
    found = lockstep.train(**how, devices=devices)
    assert max(groups) == (4 if devices == "cpu:0" else 2)
    alone = lockstep.train(**how, devices="cpu:0,cpu:1", capture=False)
    assert found.weights_sha256 == alone.weights_sha256
    assert found.buffers_sha256 == alone.buffers_sha256
    assert [done.train_loss for done in found.history] == [done.train_loss for done in alone.history]
