"""`lockstep.train` with the user's own modules: what real models need, and errors."""

import copy
import random
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.core.errors import ConfigError, DataError, LockstepError, RankError, RunError

SMALL = {"batch_size": 16, "epochs": 1, "quiet": True}  # three steps


def same_for_every_k(model, data, **settings):
    """The result on one device; three and four devices must give the same bits."""
    results = [lockstep.train(model=model, data=data, devices=k, **{**SMALL, **settings}) for k in (1, 3, 4)]
    assert len({(r.weights_sha256, r.buffers_sha256, r.first_loss, str(r.metrics)) for r in results}) == 1
    return results[0]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x)


def test_an_unused_layer_does_not_change_even_by_weight_decay(vectors):
    module = Unused()
    trained = same_for_every_k(module, vectors, optimizer="adamw", weight_decay=0.5).module
    assert torch.equal(trained.b.weight, module.b.weight)
    assert not torch.equal(trained.a.weight, module.a.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()))


def test_tied_weights_stay_tied_and_get_both_gradients(vectors):
    module = Tied()
    result = same_for_every_k(module, vectors, lr=0.1, epochs=1)
    trained = result.module
    assert trained.b.weight is trained.a.weight
    assert list(result.params) == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]
    X, y = vectors
    first = lockstep.train(model=module, data=vectors, devices=1, batch_size=40, epochs=1, lr=0.1, quiet=True).module
    F.cross_entropy(module(X), y).backward()
    expected = module.a.weight - 0.1 * module.a.weight.grad
    torch.testing.assert_close(first.a.weight, expected, rtol=0, atol=1e-6)


class FrozenBackbone(nn.Module):
    """As people write it: the backbone is not trained, and its batch norm stays in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.backbone[1].running_mean.fill_(0.3)
        self.head = nn.Linear(8, 3)
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def test_a_frozen_backbone_does_not_change(vectors):
    module = FrozenBackbone()
    trained = same_for_every_k(module, vectors).module
    for name, tensor in module.backbone.state_dict().items():
        assert torch.equal(trained.backbone.state_dict()[name], tensor), name
    assert not torch.equal(trained.head.weight, module.head.weight)


def test_a_frozen_batch_norm_still_updates_its_statistics(vectors):
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).requires_grad_(False), nn.Linear(8, 3))
    trained = same_for_every_k(module, vectors, batch_size=20).module
    assert trained[1].running_mean.abs().sum() > 0


class ReturnsTuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        scores = self.a(x)
        return scores, scores.square()


def test_a_model_that_returns_a_tuple_trains(vectors):
    module = ReturnsTuple()
    named = same_for_every_k(module, (vectors, vectors))
    assert 0 <= named.test_accuracy <= 1

    def loss(output, y):
        scores, squares = output
        return F.cross_entropy(scores, y, reduction="none") + 0.1 * squares.sum(1)

    own = same_for_every_k(module, (vectors, vectors), loss=loss)
    assert own.weights_sha256 != named.weights_sha256
    assert own.test_accuracy is None
    assert set(own.metrics) == {"loss"}


class Sometimes(nn.Module):
    """One branch is taken by some shards only, and in the last steps by none."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x) + (self.b(x) if x[:, 0].sum() > 0.5 else 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_that_get_no_gradient_in_some_shards_or_steps(vectors, optimizer):
    X, y = vectors
    X = X.clone()
    X[:20, 0] = 0.0
    settings = {"lr": 0.1, "momentum": 0.9} if optimizer == "sgd" else {"weight_decay": 0.1}
    module = Sometimes()
    result = same_for_every_k(module, (X, y), optimizer=optimizer, batch_size=4, shards=4, epochs=1, **settings)
    assert not torch.equal(result.module.b.weight, module.b.weight)
    never = same_for_every_k(module, (X[:20], y[:20]), optimizer=optimizer, batch_size=4, shards=4, **settings)
    assert torch.equal(never.module.b.weight, module.b.weight), "no gradient, no update: not even by weight decay"


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, left, right):
        return self.a(left - 2 * right)


def test_inputs_may_be_tuples_and_dicts(vectors):
    X, y = vectors
    module = TwoInputs()
    by_position = same_for_every_k(module, ((X, X + 1), y))
    by_name = same_for_every_k(module, ({"right": X + 1, "left": X}, y))
    assert by_position.weights_sha256 == by_name.weights_sha256


def test_targets_may_be_dicts(vectors):
    X, y = vectors

    def loss(output, y):
        return F.cross_entropy(output, y["label"], reduction="none") * y["weight"]

    module, weight = nn.Linear(6, 3), torch.rand(40)
    weighted = same_for_every_k(module, (X, {"label": y, "weight": weight}), loss=loss)
    plain = same_for_every_k(module, (X, {"label": y, "weight": torch.ones(40)}), loss=loss)
    assert plain.weights_sha256 == same_for_every_k(module, vectors).weights_sha256
    assert weighted.weights_sha256 != plain.weights_sha256


def test_the_users_module_and_the_process_settings_do_not_change(vectors):
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).eval()
    before = copy.deepcopy(module.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    trained = lockstep.train(model=module, data=vectors, devices=2, batch_size=20, epochs=2, quiet=True).module
    assert trained is not module
    assert not module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tobytes() == states[2]
    assert settings == (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    )
    assert threading.active_count() == 1


def test_the_module_that_a_function_makes_depends_on_the_seed_only(vectors):
    def hash_of(seed, **settings):
        torch.manual_seed(random.randrange(1000))
        settings = {**SMALL, **settings}
        return lockstep.train(model=lambda: nn.Linear(6, 3), data=vectors, seed=seed, **settings).weights_sha256

    assert hash_of(1) == hash_of(1) == hash_of(1, devices=3)
    assert hash_of(1) != hash_of(2)


def test_dropout_depends_on_seed_step_and_shard(vectors):
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
    hashes = {same_for_every_k(module, vectors, seed=seed, epochs=1).weights_sha256 for seed in (0, 1)}
    without = same_for_every_k(module[1], vectors, epochs=1).weights_sha256
    assert len({*hashes, without}) == 3


def test_random_numbers_in_the_forward_pass_are_keyed(vectors):
    module = nn.Sequential(nn.Linear(6, 6), Noisy(), nn.Linear(6, 3))
    noisy = [same_for_every_k(module, vectors, seed=seed).weights_sha256 for seed in (0, 0, 1)]
    assert noisy[0] == noisy[1] != noisy[2]


def swish(x, slope: float):
    return x * torch.sigmoid(slope * x) + torch.tanh(x).pow(2)


with warnings.catch_warnings(action="ignore"):  # that TorchScript is deprecated
    scripted = torch.jit.script(swish)


class Scripted(nn.Module):
    """TorchScript compiles a function again after some calls, unless it is told not to."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.last(scripted(self.first(x), 1.5))


def test_a_function_in_torchscript_has_the_same_bits_however_often_it_was_called(vectors):
    """In processes, so that each begins with a function that was not called yet."""
    results = [
        lockstep.train(model=Scripted, data=vectors, devices=k, engine="processes", shards=4, **{**SMALL, "epochs": 4})
        for k in (1, 2, 4)
    ]
    assert len({result.weights_sha256 for result in results}) == 1


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)], ids=str
)
def test_modes_of_the_caller_do_not_reach_the_ranks(vectors, mode):
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    settings = ({"devices": 2}, {"devices": 2, "engine": "processes"}, {"split": "network=2"})
    expected = lockstep.train(model=module, data=vectors, devices=1, **SMALL).weights_sha256
    for how in settings:
        with mode():
            assert lockstep.train(model=module, data=vectors, **how, **SMALL).weights_sha256 == expected, how


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.rand(x.shape) * torch.bernoulli(torch.full_like(x, 0.5))


def test_parameters_without_optimizer_stay_and_their_gradients_do_not_accumulate(vectors):
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    result = same_for_every_k(module, vectors, optimizer=lambda p: torch.optim.SGD(p[:2], 0.1), clip_norm=0.1)
    assert torch.equal(result.module[1].weight, module[1].weight)
    X, y = vectors
    one = lockstep.train(
        model=module,
        data=vectors,
        devices=1,
        optimizer=lambda p: torch.optim.SGD(p[:2], 1.0),
        clip_norm=0.1,
        batch_size=40,
        epochs=1,
        quiet=True,
    )
    F.cross_entropy(module(X), y).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    torch.testing.assert_close(one.module[0].weight, module[0].weight - module[0].weight.grad, rtol=0, atol=1e-6)


def test_a_default_dtype_of_float64_changes_nothing(vectors):
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    usual = lockstep.train(model=module, data=vectors, devices=2, batch_size=20, epochs=1, quiet=True)
    torch.set_default_dtype(torch.float64)
    try:
        other = lockstep.train(model=module, data=vectors, devices=2, batch_size=20, epochs=1, quiet=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert usual.weights_sha256 == other.weights_sha256


def test_the_module_that_a_function_makes_does_not_depend_on_the_state_of_numpy_and_random(vectors):
    def make():
        module = nn.Linear(6, 3)
        with torch.no_grad():
            module.bias.fill_(random.random() + np.random.rand())
        return module

    hashes = {lockstep.train(model=make, data=vectors, devices=1, **SMALL).weights_sha256 for _ in range(2)}
    assert len(hashes) == 1


def test_the_module_that_a_function_makes_does_not_depend_on_the_number_of_threads(vectors):
    """torchrun gives ranks one intra-op thread where there are several of them, and all cores where there is one."""

    def make():
        drawn = np.random.RandomState(0).randn(256, 256).astype(np.float32) / 256
        module = nn.Sequential(*(nn.Linear(*sizes) for sizes in ((6, 256), (256, 256), (256, 256), (256, 3))))
        nn.init.orthogonal_(module[1].weight)  # has other bits with two threads than with one
        module[2].weight.data.copy_(torch.from_numpy(drawn @ drawn))  # and so has this
        return module

    def hash_of(num_threads):
        torch.set_num_threads(num_threads)
        with threadpool_limits(num_threads, "blas"):
            found = lockstep.train(model=make, data=vectors, devices=1, **SMALL).weights_sha256
        assert torch.get_num_threads() == num_threads
        return found

    before = torch.get_num_threads()
    try:
        assert hash_of(1) == hash_of(2)
    finally:
        torch.set_num_threads(before)


def test_clipping_is_that_of_the_whole_gradient(vectors):
    X, y = vectors
    module = nn.Linear(6, 3)
    result = same_for_every_k(module, vectors, clip_norm=0.01, batch_size=40, epochs=1, lr=1.0)
    F.cross_entropy(module(X), y).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    for new, old in zip(result.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(new, old - old.grad, rtol=0, atol=1e-6)


def test_bf16_changes_the_bits_and_keeps_float32_parameters(vectors):
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    low, full = same_for_every_k(module, vectors, precision="bf16"), same_for_every_k(module, vectors)
    assert low.weights_sha256 != full.weights_sha256
    assert all(param.dtype == torch.float32 for param in low.module.parameters())


@pytest.mark.parametrize("sizes", [(1, 8), (3, 8), (40, 8), (7, 5)], ids=str)
def test_batches_smaller_than_the_shards_and_uneven_ones(vectors, sizes):
    batch_size, shards = sizes
    module = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 3))
    result = same_for_every_k(module, vectors, batch_size=batch_size, shards=shards, epochs=1)
    assert result.steps == -(-40 // batch_size), "every sample is trained on, also those of the short last batch"


@pytest.mark.parametrize("exchange", ["gather", "tree"])
def test_every_exchange_gives_the_same_bits(vectors, exchange):
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    sharded = same_for_every_k(module, vectors, batch_size=20)
    other = lockstep.train(
        model=module, data=vectors, devices=3, exchange=exchange, batch_size=20, epochs=1, quiet=True
    )
    assert (other.weights_sha256, other.buffers_sha256) == (sharded.weights_sha256, sharded.buffers_sha256)


def test_regression_targets_of_shape_n_and_n_1_are_the_same(vectors):
    X, _ = vectors
    module = nn.Linear(6, 1)
    flat = same_for_every_k(module, (X, X.sum(1)), loss="mse", lr=0.1)
    column = same_for_every_k(module, (X, X.sum(1, keepdim=True)), loss="mse", lr=0.1)
    assert flat.weights_sha256 == column.weights_sha256
    assert flat.history[-1].train_loss < flat.first_loss


def test_parameter_groups_by_name(vectors):
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))

    def by_name(named_parameters):
        first = [param for name, param in named_parameters if name.startswith("0.")]
        return torch.optim.SGD([{"params": first, "lr": 0.0}, {"params": [dict(named_parameters)["1.bias"]]}], lr=0.1)

    trained = same_for_every_k(module, vectors, optimizer=by_name).module
    assert torch.equal(trained[0].weight, module[0].weight)
    assert torch.equal(trained[1].weight, module[1].weight)
    assert not torch.equal(trained[1].bias, module[1].bias)


@pytest.mark.parametrize("settings", [{}, {"batch_norm": "sync"}], ids=str)
def test_submodules_in_evaluation_mode_stay_in_it(vectors, settings):
    module = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)), nn.Linear(4, 3))
    module[1].eval()
    trained = same_for_every_k(module, (vectors, vectors), **settings).module
    assert float(trained[1][0].running_mean.abs().sum()) == 0
    assert module[0].training
    assert not module[1][0].training


def test_devices_may_be_torch_devices(vectors):
    result = lockstep.train(model=nn.Linear(6, 3), data=vectors, devices=torch.device("cpu"), **SMALL)
    assert result.devices == ["cpu:0"]
    result = lockstep.train(model=nn.Linear(6, 3), data=vectors, devices=[torch.device("cpu:0"), "cpu:1"], **SMALL)
    assert result.devices == ["cpu:0", "cpu:1"]


# --- errors ---


def test_shards_of_one_sample_are_refused_for_batch_norm_before_anything_starts(vectors):
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ConfigError) as refused:
        lockstep.train(model=module, data=vectors, devices=1, **SMALL)
    assert str(refused.value) == (
        "Some shards have one sample only, which is too few for batch norm (Expected more than 1 value per channel "
        "when training, got input size torch.Size([1, 4])): 40 samples in batches of 16 leave a batch of 8 for 8 "
        "shards. Use fewer shards (--shards 4), another batch size, or the whole batch's statistics (--batch-norm "
        "sync)."
    )
    lockstep.train(model=module, data=vectors, devices=1, shards=4, **SMALL)
    lockstep.train(model=module, data=vectors, devices=2, batch_norm="sync", **SMALL)
    images = torch.rand(40, 1, 4, 4), vectors[1]
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    lockstep.train(model=convolution, data=images, devices=1, **SMALL)  # one image has many values a channel


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        if self.training:
            raise ValueError("my own mistake")
        return self.a(x)


@pytest.mark.parametrize("settings", [{}, {"batch_norm": "sync"}], ids=str)
def test_a_model_that_raises_names_the_users_line_the_rank_and_the_device(vectors, settings):
    began = time.monotonic()
    with pytest.raises(RankError) as failed:
        lockstep.train(model=Raises(), data=vectors, devices=3, **SMALL, **settings)
    assert time.monotonic() - began < 40, "nobody waits for the deadline, which is 60"
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if 'raise ValueError("my own mistake")' in text)
    assert str(failed.value) == (
        f"rank 0 (cpu:0), during forward and backward: ValueError: my own mistake (at {__file__}:{line})"
    )
    assert isinstance(failed.value.__cause__, ValueError)
    assert threading.active_count() == 1
    lockstep.train(model=nn.Linear(6, 3), data=vectors, devices=3, **SMALL)  # the next run works


def test_a_model_that_raises_on_one_rank_does_not_make_the_others_hang(vectors):
    class RaisesOnce(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a = nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x):
            if self.training and threading.current_thread().name.endswith("rank-1"):
                raise ValueError("only here")
            return self.a(self.norm(x))

    with pytest.raises(RankError, match=r"rank 1 \(cpu:1\), during forward and backward: ValueError: only here"):
        lockstep.train(model=RaisesOnce(), data=vectors, devices=3, batch_size=20, epochs=2, quiet=True)
    assert threading.active_count() == 1


PART = torch.rand(40, 6), torch.zeros(40, dtype=torch.int64)
ERRORS = [
    ({"model": 5}, ConfigError, "The model is a int. Give a torch.nn.Module, or a function that makes one."),
    ({"model": lambda: 5}, ConfigError, "The function for the model returned a int."),
    ({"model": "resnet"}, ConfigError, "There is no model called 'resnet'. Did you mean 'resnet50'?"),
    ({"model": nn.Linear(6, 3).double()}, ConfigError, "The parameter weight is torch.float64."),
    ({"model": nn.LazyLinear(3)}, ConfigError, "weight has no shape yet (a lazy layer)."),
    ({"model": nn.Linear(6, 3).requires_grad_(False)}, ConfigError, "Linear has no parameter to train"),
    ({"loss": "crossentropy"}, ConfigError, "There is no loss called 'crossentropy'. Did you mean 'cross_entropy'?"),
    ({"loss": 3}, ConfigError, "The loss is a int."),
    (
        {"loss": lambda o, y: F.multi_margin_loss(o, y)},
        RunError,
        "The loss returned a tensor of shape () for 2 samples.",
    ),
    ({"loss": lambda o, y: o}, RunError, "The loss returned a tensor of shape (2, 3) for 2 samples."),
    ({"loss": lambda o, y: 0.5}, RunError, "The loss returned a float for 2 samples."),
    ({"loss": lambda o, y: o.detach().sum(1)}, RunError, "The loss does not depend on any parameter that is trained."),
    ({"optimizer": "adamax"}, ConfigError, "There is no optimizer called 'adamax'. Did you mean 'adam'?"),
    (
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        ConfigError,
        "The optimizer is a SGD that belongs to",
    ),
    ({"optimizer": lambda p: 3}, ConfigError, "The optimizer's function returned a int."),
    ({"optimizer": torch.optim.LBFGS}, ConfigError, "The optimizer LBFGS cannot be used: LBFGS.step() missing"),
    (
        {"optimizer": torch.optim.SparseAdam},
        ConfigError,
        "The optimizer SparseAdam cannot be used: SparseAdam does not",
    ),
    ({"optimizer": torch.optim.Adam, "lr": 0.1}, ConfigError, "The optimizer is made by a function"),
    ({"scheduler": lambda o: o, "warmup": 3}, ConfigError, "There is a scheduler, and a schedule or a warm-up too."),
    (
        {"optimizer": lambda p: torch.optim.SGD(nn.Linear(1, 1).parameters())},
        ConfigError,
        "The function for the optimizer gives",
    ),
    ({"optimizer": lambda p: p.x}, ConfigError, "The function for the optimizer failed: AttributeError: 'list' object"),
    ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, ConfigError, "The scheduler is a ReduceLROnPlateau."),
    ({"scheduler": lambda o: 3}, ConfigError, "The scheduler is a int."),
    (
        {"model": lambda: 1 / 0},
        ConfigError,
        "The function for the model failed: ZeroDivisionError: division by zero (at ",
    ),
    ({"loss": nn.Linear(3, 1)}, ConfigError, "The loss has parameters of its own"),
    (
        {"metrics": [lambda o, y: y, lambda o, y: y], "data": (PART, PART)},
        ConfigError,
        "Metrics need different names.",
    ),
    ({"metrics": {"loss": "mse"}, "data": (PART, PART)}, ConfigError, "A metric called 'loss' would hide the loss"),
    (
        {"model": nn.Embedding(4, 3, max_norm=0.1), "data": (torch.arange(40) % 4, torch.zeros(40, dtype=int))},
        RunError,
        "The model changes its parameter weight in the forward pass",
    ),
    ({"metrics": "accuracy", "data": PART}, ConfigError, "There are metrics and no test samples to measure."),
    ({"metrics": {"none": None}, "data": (PART, PART)}, ConfigError, "The metric is a NoneType. Give a name, or a"),
    ({"devices": [0, 1]}, ConfigError, "'0' is not the name of a device."),
    (
        {"schedule": None},
        ConfigError,
        "schedule must be a name, got None (--schedule).",
    ),
    ({"scheduler": "cosine"}, ConfigError, "The scheduler is a str. Give a function that takes the optimizer"),
    ({"loss": nn.CrossEntropyLoss}, ConfigError, "The loss is the class CrossEntropyLoss. Make one"),
    ({"model": nn.Linear(6, 3, device="meta")}, ConfigError, "weight is on the device meta, and has no values."),
    ({"loss": "mse"}, RunError, "The model returns a shape of (2, 3) for targets of shape (2,)."),
    (
        {"loss": lambda o, y: o.sum(1) * torch.nan},
        RunError,
        "epoch 1, step 1: the loss is NaN or infinite. No update",
    ),
    ({"metrics": ["top5"], "data": (PART, PART)}, ConfigError, "There is no metric called 'top5'."),
    (
        {"data": (torch.rand(3, 6), torch.zeros(2))},
        DataError,
        "data given in Python: samples and targets of the training",
    ),
    (
        {"data": DataLoader(TensorDataset(torch.rand(3, 6)))},
        DataError,
        "The training data is a DataLoader, which makes batches",
    ),
    ({"grad_clip": 1.0}, TypeError, "unexpected keyword argument 'grad_clip'. Did you mean 'clip_norm'?"),
    ({"data": torch.rand(3, 6)}, DataError, "data given in Python: the training data is a Tensor."),
    (
        {"data": (torch.full((3, 6), torch.nan), torch.zeros(3))},
        DataError,
        "data given in Python: the training samples hold",
    ),
    ({"batch_size": 41}, ConfigError, "A batch of 41 samples is larger than data given in Python, which has 40"),
    (
        {"batch_norm": "synk"},
        ConfigError,
        "batch norm must be shard or sync, got 'synk' (--batch-norm). Did you mean 'sync'?",
    ),
    ({"precision": "fp16"}, ConfigError, "precision must be bf16, fp32 or tf32, got 'fp16' (--precision)."),
    ({"backend": "numpy"}, ConfigError, "a Linear given in Python needs --backend torch. In numpy, use --model lenet."),
]


@pytest.mark.parametrize(("wrong", "kind", "sentence"), ERRORS, ids=[sentence[:40] for _, _, sentence in ERRORS])
def test_wrong_arguments_are_refused_in_a_sentence(vectors, wrong, kind, sentence):
    settings = {"model": nn.Linear(6, 3), "data": vectors, "devices": 1, **SMALL, **wrong}
    with pytest.raises(kind) as refused:
        lockstep.train(**settings)
    assert str(refused.value).startswith(sentence)
    assert threading.active_count() == 1


class ClipsInEvaluation(nn.Linear):
    def forward(self, x):
        if not self.training:
            with torch.no_grad():
                self.weight.mul_(0.99)
        return super().forward(x)


@pytest.mark.parametrize(
    "how", [{"devices": 1}, {"devices": 2}, {"devices": 1, "slices": 2}, {"split": "layers=2", "slices": 2}]
)
def test_a_parameter_that_evaluation_writes_to_is_refused(vectors, how):
    model = nn.Sequential(ClipsInEvaluation(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(LockstepError, match=r"The model changes its parameter 0\.weight in the forward pass"):
        lockstep.train(model=model, data=(vectors, vectors), **SMALL, **how)


def test_a_loss_that_uses_the_users_module_instead_of_the_replica_is_refused(vectors):
    module = nn.Linear(6, 3)

    def loss(output, y):
        return F.cross_entropy(output, y, reduction="none") + module.weight.square().sum()

    for _ in range(2):  # the second time there are gradients
        with pytest.raises(RunError, match="uses the module that you gave, and not the replica"):
            lockstep.train(model=module, data=vectors, loss=loss, **SMALL)


class Counter(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class OwnStatistics(nn.Linear):
    """As the text writes batch norm: the statistics are no buffer."""

    def __init__(self):
        super().__init__(6, 3)
        self.moving_mean = torch.zeros(6)

    def forward(self, x):
        self.moving_mean = 0.9 * self.moving_mean + 0.1 * x.mean(0)
        return super().forward(x)


@pytest.mark.parametrize(("kind", "name"), [(Counter, "calls"), (OwnStatistics, "moving_mean")])
def test_state_outside_of_buffers_is_refused(vectors, kind, name):
    with pytest.raises(RunError, match=f"The model changes its attribute {name} in the forward pass"):
        lockstep.train(model=kind(), data=vectors, devices=2, **SMALL)


def test_attributes_that_the_model_never_reads_are_allowed(vectors):
    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.last, self.auxiliary = None, 0.0

        def forward(self, x):
            self.last, self.auxiliary = x, x.sum()
            return super().forward(x)

    module = Keeps()
    result = same_for_every_k(module, vectors)
    plain = nn.Linear(6, 3)
    plain.load_state_dict(module.state_dict())
    assert result.weights_sha256 == same_for_every_k(plain, vectors).weights_sha256


def test_a_module_that_cannot_be_copied_is_refused(vectors):
    class Holds(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.lock = threading.Lock()

    with pytest.raises(
        ConfigError, match=r"Holds cannot be copied to each device: cannot pickle '_thread\.lock' object"
    ):
        lockstep.train(model=Holds(), data=vectors, devices=2, **SMALL)


def test_a_class_with_a_method_called_load_is_a_function_that_makes_a_model(vectors):
    class Net(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)

        @classmethod
        def load(cls, path):
            raise NotImplementedError

    result = lockstep.train(model=Net, data=vectors, devices=1, **SMALL)
    assert type(result.module) is Net


def test_expanded_buffers_are_allowed(vectors):
    class Expanded(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("scale", torch.ones(1).expand(6))

        def forward(self, x):
            return super().forward(x * self.scale)

    result = same_for_every_k(Expanded(), vectors)
    assert torch.equal(result.module.scale, torch.ones(6))


def test_sparse_gradients_are_refused(vectors):
    _, y = vectors
    module = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(LockstepError, match=r"The gradient of 0\.weight is sparse"):
        lockstep.train(model=module, data=(torch.arange(40)[:, None] % 10, y), devices=2, **SMALL)


def test_unfreezing_during_the_run_is_refused(vectors):
    class Unfreezes(Unused):
        def forward(self, x):
            self.b.requires_grad_(True)
            return super().forward(x)

    module = Unfreezes()
    module.b.requires_grad_(False)
    with pytest.raises(RunError, match="changed which parameters are trained"):
        lockstep.train(model=module, data=vectors, devices=1, **SMALL)


def test_a_loss_that_is_not_finite_stops_the_run(vectors):
    with pytest.raises(RunError, match="the loss is NaN or infinite"):
        lockstep.train(model=lambda: nn.Linear(6, 3), data=vectors, devices=2, lr=3e38, **SMALL)
