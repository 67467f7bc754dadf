"""Buffers after a step are those of a plain loop over the shards, and do not depend on the devices."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.core.errors import ConfigError, RunError
from lockstep.data.order import sample_order
from lockstep.partition.batch import split_into_shards

SETTINGS = {"batch_size": 24, "epochs": 2, "lr": 0.01, "shards": 8, "quiet": True}


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(96, 2, 4, 4, generator=generator) + 1, torch.randint(3, (96,), generator=generator)


def plain_loop(module, data):
    """The same samples and shards, one after the other."""
    module, (X, y) = copy.deepcopy(module).train(), data
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for epoch in range(2):
        for chosen in torch.from_numpy(sample_order(0, epoch, len(X))).split(24):
            for shard in split_into_shards(len(chosen), 8):
                own = chosen[shard.start : shard.stop]
                F.cross_entropy(module(X[own]), y[own], reduction="sum").backward()
            for param in module.parameters():
                param.grad /= len(chosen)
            optimizer.step()
            optimizer.zero_grad()
    return module


def check(module, data):
    """Trains on 1, 2 and 5 devices: equal buffers, and those of the plain loop."""
    results = [lockstep.train(model=module, data=data, devices=k, **SETTINGS) for k in (1, 2, 5)]
    assert len({(result.buffers_sha256, result.weights_sha256) for result in results}) == 1
    expected = dict(plain_loop(module, data).named_buffers())
    for name, buffer in results[0].module.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=1e-5, atol=1e-5, msg=name)
        before = dict(module.named_buffers())[name]
        assert not torch.equal(buffer, before), f"{name} did not change, so this test proves nothing"
    return results[0].module


def net(*layers):
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0, None])
def test_running_statistics_are_those_of_shards_one_after_the_other(images, momentum):
    check(net(nn.BatchNorm2d(4, momentum=momentum)), images)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_instance_norm_has_running_statistics_too(images, momentum):
    module = net(nn.ReLU(), nn.InstanceNorm2d(4, track_running_stats=True, momentum=momentum))
    with torch.no_grad():
        module[0].bias[0] = -100  # a channel of zeros
    results = [lockstep.train(model=module, data=images, devices=k, **SETTINGS) for k in (1, 3)]
    assert results[0].buffers_sha256 == results[1].buffers_sha256
    expected = plain_loop(module, images)[2]
    torch.testing.assert_close(results[0].module[2].running_mean, expected.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0].module[2].running_var, expected.running_var, rtol=1e-5, atol=1e-5)


def test_a_norm_layer_that_is_used_twice_counts_twice(images):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.body = nn.BatchNorm2d(2), net()

        def forward(self, x):
            return self.body(self.norm(self.norm(x) * 3 + 1))

    trained = check(Twice(), images)
    assert int(trained.norm.num_batches_tracked) == 2 * 2 * 4 * 8  # calls, epochs, steps, shards


def test_a_norm_layer_that_only_some_shards_use(images):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.body = nn.BatchNorm2d(2), net()

        def forward(self, x):
            return self.body(self.norm(x) if x.mean() > 1 else x)

    trained = check(Sometimes(), images)
    assert 0 < int(trained.norm.num_batches_tracked) < 2 * 4 * 8


class Counts(nn.Module):
    """Counters of calls and samples, a flag, and a mean that is replaced instead of written to."""

    def __init__(self):
        super().__init__()
        self.body = net()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("samples", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("seen", torch.tensor(False))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.samples = self.samples + len(x)
            self.seen |= True
        return self.body(x)


def test_integers_are_counters(images):
    trained = check(Counts(), images)
    assert int(trained.calls) == 2 * 4 * 8
    assert trained.samples.tolist() == [192, 192]
    assert bool(trained.seen)


class Averages(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("same", torch.full((3,), 0.1))

    def forward(self, x):
        if self.training:
            self.average = x.mean((0, 2, 3))
            self.same.mul_(1.1)
        return self.body(x)


def test_floats_become_the_mean_over_samples_and_keep_their_bits_where_all_agree(images):
    X, y = images
    settings = {**SETTINGS, "batch_size": 21, "epochs": 1}  # shards of 3 and 2 samples
    results = [lockstep.train(model=Averages(), data=(X[:21], y[:21]), devices=k, **settings) for k in (1, 2, 5)]
    assert len({result.buffers_sha256 for result in results}) == 1
    trained = results[0].module
    torch.testing.assert_close(trained.average, X[:21].mean((0, 2, 3)), rtol=0, atol=1e-6)
    assert torch.equal(trained.same, torch.full((3,), 0.1).mul_(1.1))


class Conditional(nn.Module):
    """Buffers that only some shards change, that are written to through `.data`, and that are infinite."""

    def __init__(self):
        super().__init__()
        self.body = net()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("hidden", torch.zeros(2))
        self.register_buffer("mask", torch.zeros(3))

    def forward(self, x):
        if self.training:
            if x.mean() > 1:
                self.calls += 1
            self.hidden.data.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
            self.mask = torch.full((3,), -torch.inf)
        return self.body(x + self.hidden.mean())


def test_buffers_that_only_some_shards_change_or_that_are_written_to_through_data(images):
    module = Conditional()
    results = [lockstep.train(model=module, data=images, devices=k, **SETTINGS) for k in (1, 2, 5)]
    assert len({(result.weights_sha256, result.buffers_sha256) for result in results}) == 1
    trained = results[0].module
    assert 0 < int(trained.calls) < 2 * 4 * 8
    assert float(trained.hidden.min()) > 0
    assert torch.isneginf(trained.mask).all()


def test_a_buffer_that_was_none_is_refused(images):
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()
            self.register_buffer("later", None)

        def forward(self, x):
            self.later = torch.ones(2)
            return self.body(x)

    with pytest.raises(RunError, match="The buffer later was None, and the model sets it in its forward pass"):
        lockstep.train(model=Later(), data=images, devices=2, **SETTINGS)


@pytest.mark.parametrize("batch_norm", ["shard", "sync"])
def test_ranks_without_shards_have_the_statistics_too(images, batch_norm):
    """The last batch has two samples, for two of eight shards: with four devices, two have no shard."""
    X, y = images
    module = net(nn.BatchNorm2d(4))
    settings = {**SETTINGS, "batch_norm": batch_norm}
    results = [
        lockstep.train(model=module, data=((X[:50], y[:50]), (X, y)), devices=k, **settings) for k in (1, 2, 4, 8)
    ]
    assert len({(str(result.history[0].metrics), str(result.metrics)) for result in results}) == 1
    assert len({(result.weights_sha256, result.buffers_sha256) for result in results}) == 1


def test_a_first_batch_that_leaves_ranks_idle(images):
    X, y = images
    module = net(nn.BatchNorm2d(4))
    results = [
        lockstep.train(model=module, data=((X[:2], y[:2]), (X, y)), devices=k, **{**SETTINGS, "batch_size": 2})
        for k in (1, 8)
    ]
    assert results[0].metrics == results[1].metrics


def test_evaluation_does_not_change_buffers_even_where_the_model_draws(images):
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net(nn.BatchNorm2d(4))
            self.register_buffer("looks", torch.tensor(0.0))

        def forward(self, x):
            if not self.training:
                self.looks += 1
                x = x + 0.1 * torch.randn_like(x) + 0.1 * self.looks
            return self.body(x)

    module = Draws()
    results = [lockstep.train(model=module, data=(images, images), devices=k, **SETTINGS) for k in (1, 3)]
    assert results[0].metrics == results[1].metrics
    assert float(results[0].module.looks) == 0
    torch.testing.assert_close(
        results[0].module.body[1].running_var, plain_loop(module, images).body[1].running_var, rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore")  # that they are old
@pytest.mark.parametrize("name", ["spectral_norm", "weight_norm"])
def test_the_old_norms_of_weights_are_refused_with_the_new_ones(images, name):
    module = nn.Sequential(nn.Flatten(), getattr(nn.utils, name)(nn.Linear(32, 3)))
    with pytest.raises(ConfigError, match=rf"1 has the old .*Use torch.nn.utils.parametrizations.{name}"):
        lockstep.train(model=module, data=images, batch_size=8, quiet=True)


def test_spectral_norm_trains(images):
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 4, 3)), nn.Flatten(), nn.Linear(16, 3))
    results = [lockstep.train(model=module, data=images, devices=k, **SETTINGS) for k in (1, 3)]
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].buffers_sha256 == results[1].buffers_sha256


def test_a_buffer_that_grows_is_refused(images):
    class Grows(Averages):
        def forward(self, x):
            self.average = torch.cat([self.average, torch.zeros(1)])
            return self.body(x)

    with pytest.raises(RunError, match="The buffer average of Grows changed its shape or dtype in a step"):
        lockstep.train(model=Grows(), data=images, devices=2, **SETTINGS)


def test_large_buffers_that_are_not_written_to_are_no_part_of_the_result(images):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net()
            self.register_buffer("mask", torch.ones(1000, 1000), persistent=False)

        def forward(self, x):
            return self.body(x * self.mask[0, 0])

    result = lockstep.train(model=Masked(), data=images, devices=2, **SETTINGS)
    assert result.buffers == {}, "what is not persistent is not part of the result"


class Flags(nn.Module):
    """Flags that every shard clears, that one of them sets, and that none touches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        for name, value in (("cleared", True), ("set", False), ("left", True)):
            self.register_buffer(name, torch.tensor(value))

    def forward(self, X):
        self.cleared.fill_(False)
        self.set.logical_or_((X > 0.99).any())
        return self.layer(X)


def test_a_flag_is_true_if_it_is_in_any_shard():
    X = torch.zeros(16, 4)
    X[13] = 1.0
    for shards, devices in ((1, 1), (4, 1), (4, 2), (4, 3)):
        how = {"batch_size": 16, "epochs": 2, "shards": shards, "devices": devices, "quiet": True}
        found = lockstep.train(model=Flags, data=(X, torch.arange(16) % 3), **how).buffers
        assert {name: bool(value) for name, value in found.items()} == {"cleared": False, "set": True, "left": True}
