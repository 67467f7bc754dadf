"""Batch norm over the whole batch: that of a plain loop without shards, on any number of devices."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.core.errors import RankError, RunError
from lockstep.data.order import sample_order
from lockstep.models.losses import LossSum
from lockstep.models.resnet18 import ResNet18
from lockstep.replicas.replica import Shard
from lockstep.replicas.sync_batch_norm import SyncBatchNorm

SETTINGS = {"batch_size": 20, "epochs": 2, "lr": 0.05, "momentum": 0.9, "batch_norm": "sync", "quiet": True}


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 1, 8, 8, generator=generator) + 1, torch.randint(3, (50,), generator=generator)


class Branches(nn.Module):
    """Norm layers in sequence, in parallel branches, and beside a skip connection."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None))
        self.left = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
        self.last = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(256), nn.Linear(256, 3))

    def forward(self, x):
        x = self.first(x).relu()
        return self.last((x + self.left(x) + self.right(x)).relu())


def plain_loop(module, data):
    """Whole batches, no shards."""
    module, (X, y) = copy.deepcopy(module).train(), data
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    for epoch in range(2):
        for chosen in torch.from_numpy(sample_order(0, epoch, len(X))).split(20):
            F.cross_entropy(module(X[chosen]), y[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return module


def test_weights_and_statistics_are_those_of_a_loop_without_shards(images):
    module = Branches()
    results = [lockstep.train(model=module, data=images, devices=k, **SETTINGS) for k in (1, 2, 3, 8)]
    assert len({(result.weights_sha256, result.buffers_sha256) for result in results}) == 1
    expected = plain_loop(module, images).state_dict()
    for name, tensor in results[0].module.state_dict().items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-4, atol=1e-4, msg=lambda message, n=name: f"{n}: {message}"
        )
    by_shard = lockstep.train(model=module, data=images, devices=2, **{**SETTINGS, "batch_norm": "shard", "shards": 4})
    assert by_shard.weights_sha256 != results[0].weights_sha256
    assert threading.active_count() == 1


class Remembers(nn.Module):
    """Keeps a tensor in an attribute from one norm layer to the next."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 8), nn.BatchNorm1d(8, affine=False)
        self.relu, self.c, self.out = nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        self.skip = self.a(x.flatten(1))
        x = self.c(self.relu(self.b(self.skip)))
        return self.out(x + self.skip)


def test_what_a_shard_keeps_in_an_attribute_is_its_own(images):
    module = Remembers()
    results = [lockstep.train(model=module, data=images, devices=k, **SETTINGS) for k in (1, 2, 4, 8)]
    assert len({(result.weights_sha256, result.buffers_sha256) for result in results}) == 1
    expected = plain_loop(module, images).state_dict()
    for name, tensor in results[0].module.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)


def test_a_norm_layer_with_a_forward_pass_of_its_own_is_refused(images):
    class NormAct(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).relu()

    module = nn.Sequential(nn.Flatten(), NormAct(64), nn.Linear(64, 3))
    with pytest.raises(RunError, match="1 is a NormAct, a batch norm with a forward pass of its own"):
        lockstep.train(model=module, data=images, devices=2, **SETTINGS)
    assert threading.active_count() == 1


def test_a_model_that_catches_everything_does_not_hang(images):
    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.again, self.out = nn.BatchNorm1d(64), nn.BatchNorm1d(64), nn.Linear(64, 3)

        def forward(self, x):
            x = x.flatten(1)
            if x[0, 0] > 1.5:
                raise ValueError("bad sample")
            try:
                x = self.norm(x)
            except BaseException:
                x = self.again(x)
            return self.out(x)

    with pytest.raises(RankError, match="ValueError: bad sample"):
        lockstep.train(model=Catches(), data=images, devices=1, **SETTINGS)
    assert threading.active_count() == 1


def test_dropout_between_norm_layers_is_keyed_by_the_shard(images):
    module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.5),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )
    hashes = {lockstep.train(model=module, data=images, devices=k, **SETTINGS).weights_sha256 for k in (1, 2, 4)}
    assert len(hashes) == 1


def test_resnet_and_bfloat16(images):
    module = ResNet18(in_channels=1, num_classes=3, width=4)
    settings = {**SETTINGS, "epochs": 1, "precision": "bf16"}
    hashes = {lockstep.train(model=module, data=images, devices=k, **settings).weights_sha256 for k in (1, 3)}
    assert len(hashes) == 1


def test_a_model_without_norm_layers_has_the_same_bits_as_without_sync(images):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    sync = lockstep.train(model=module, data=images, devices=2, **SETTINGS)
    assert (
        sync.weights_sha256
        == lockstep.train(model=module, data=images, devices=1, **{**SETTINGS, "batch_norm": "shard"}).weights_sha256
    )


class Fork(nn.Module):
    """Shards take different paths, depending on their samples."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(64), nn.BatchNorm1d(64)
        self.out = nn.Linear(64, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.out(self.a(x) if x.mean() > 1 else self.b(x))


class Stops(Fork):
    def forward(self, x):
        x = x.flatten(1)
        return self.out(self.a(x) if x.mean() > 1 else x)


@pytest.mark.parametrize("kind", [Fork, Stops])
@pytest.mark.parametrize("k", [1, 8])
def test_shards_that_take_different_paths_are_an_error_and_no_hang(images, kind, k):
    with pytest.raises(RunError, match="Shards of one batch take different paths through the model: one is at"):
        lockstep.train(model=kind(), data=images, devices=k, **SETTINGS)
    assert threading.active_count() == 1


@pytest.mark.parametrize("k", [1, 3])
def test_a_shard_that_fails_ends_all_others(images, k):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(64), nn.Linear(64, 3)

        def forward(self, x):
            x = self.norm(x.flatten(1))
            if self.training and x[0, 0] > 0:
                raise ValueError("bad sample")
            return self.out(x)

    with pytest.raises(RankError, match=r"ValueError: bad sample \(at .*test_sync_batch_norm.py:\d+\)"):
        lockstep.train(model=Fails(), data=images, devices=k, **SETTINGS)
    assert threading.active_count() == 1


def test_buffers_that_are_not_running_statistics_are_refused(images):
    class Counts(Fork):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += 1
            return self.out(self.a(x.flatten(1)))

    with pytest.raises(RunError, match="The model changes its buffer calls"):
        lockstep.train(model=Counts(), data=images, devices=2, **SETTINGS)


def test_a_batch_of_one_sample_is_refused(images):
    X, y = images
    norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))
    with pytest.raises(RunError, match="A batch of one sample is too small for batch norm"):
        lockstep.train(model=norm, data=(X[:21], y[:21]), devices=2, **SETTINGS)


def test_a_loss_that_uses_the_users_own_module_is_refused(images):
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))

    def loss(output, y):
        return F.cross_entropy(output, y, reduction="none") + module[2].weight.square().sum()

    with pytest.raises(RunError, match="uses the module that you gave, and not the replica"):
        lockstep.train(model=module, data=images, devices=2, loss=loss, **SETTINGS)


def test_a_step_that_failed_leaves_no_gradients_to_the_next(images):
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))

    def forward(clone, random, shard):
        return LossSum(F.cross_entropy(clone(shard.X), shard.y, reduction="sum"))

    sync = SyncBatchNorm(module, forward, lambda: None)

    def gradients(all_gather):
        ((_, found),) = sync.forward_backward([Shard(0, 50, *images)], all_gather)
        return found

    def fails(layer, tensors):
        if layer.startswith("the backward pass"):
            raise RuntimeError("another rank failed")
        return tensors

    expected = gradients(lambda layer, tensors: tensors)
    with pytest.raises(RuntimeError, match="another rank failed"):
        gradients(fails)
    for again, first in zip(gradients(lambda layer, tensors: tensors), expected, strict=True):
        assert torch.equal(again, first)
