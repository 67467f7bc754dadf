"""Optimizers that can be used; and learning rates, step by step, against a plain loop: schedules, groups."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

import lockstep
from lockstep.core.errors import ConfigError
from lockstep.data.order import sample_order
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.optim.torch_optimizers import check_can_step

NUM_SAMPLES, BATCH, EPOCHS = 40, 10, 3
NUM_STEPS = EPOCHS * NUM_SAMPLES // BATCH


def two_groups(params):
    weights, biases = [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]
    return torch.optim.SGD([{"params": weights, "lr": 0.3}, {"params": biases, "lr": 0.01}], lr=1.0, momentum=0.9)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=[0.5, 0.05], total_steps=NUM_STEPS + 1)


CASES = {
    "warm-up and cosine": ({"optimizer": "sgd", "lr": 0.5, "schedule": "cosine", "warmup": 4}, None),
    "linear": ({"optimizer": "sgd", "lr": 0.5, "momentum": 0.9, "schedule": "linear"}, None),
    "warm-up alone, adam": ({"optimizer": "adam", "lr": 0.05, "warmup": 5}, None),
    "groups keep their own rates": ({"optimizer": two_groups}, None),
    "groups with a schedule": ({"optimizer": two_groups, "schedule": "cosine", "warmup": 3}, None),
    "a scheduler": ({"optimizer": two_groups}, one_cycle),
    "milestones": ({"optimizer": two_groups}, lambda optimizer: MultiStepLR(optimizer, [3, 7], gamma=0.1)),
}


def plain_loop(model, X, y, settings, scheduler):
    """One shard a batch, so no gradients are added."""
    params = list(model.parameters())
    if callable(settings["optimizer"]):
        optimizer = settings["optimizer"](params)
    elif settings["optimizer"] == "adam":
        optimizer = torch.optim.Adam(params, settings["lr"])
    else:
        optimizer = torch.optim.SGD(params, settings["lr"], momentum=settings.get("momentum", 0.0))
    full = [group["lr"] for group in optimizer.param_groups]
    schedule = LRSchedule(settings.get("schedule", "constant"), settings.get("warmup", 0), NUM_STEPS)
    scheduler = scheduler and scheduler(optimizer)
    step = 0
    for epoch in range(EPOCHS):
        for chosen in torch.from_numpy(sample_order(0, epoch, NUM_SAMPLES)).split(BATCH):
            step += 1
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[chosen]), y[chosen]).backward()
            if scheduler is None:
                for group, rate in zip(optimizer.param_groups, full, strict=True):
                    group["lr"] = rate * schedule.factor(step)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return model


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_rate_of_a_plain_loop(vectors, case):
    settings, scheduler = CASES[case]
    X, y = vectors
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    expected = plain_loop(copy.deepcopy(model), X, y, settings, scheduler)
    result = lockstep.train(
        model=model,
        data=vectors,
        shards=1,
        devices=1,
        batch_size=BATCH,
        epochs=EPOCHS,
        scheduler=scheduler,
        quiet=True,
        **settings,
    )
    for name, array in result.params.items():
        torch.testing.assert_close(torch.from_numpy(array), expected.state_dict()[name], rtol=0, atol=1e-5)


KINDS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind is not torch.optim.Optimizer]
UNUSABLE = (torch.optim.LBFGS, torch.optim.SparseAdam)


def parameters(*shapes):
    return [nn.Parameter(torch.ones(shape)) for shape in shapes or [(3, 4), (2, 2)]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNUSABLE], ids=lambda kind: kind.__name__)
def test_optimizers_of_pytorch_can_be_used(kind):
    check_can_step(kind(parameters(), lr=0.1))


@pytest.mark.parametrize("option", ["fused", "capturable", "foreach", "maximize"])
def test_options_that_are_for_gpus_are_not_refused(option):
    check_can_step(torch.optim.Adam(parameters(), lr=0.1, **{option: True}))


class Inherited(torch.optim.SparseAdam):
    """The step is PyTorch's."""


class NeedsClosure(torch.optim.SGD):
    """Like sharpness-aware minimization."""

    def step(self, closure):
        raise AssertionError("never called")


class Counts(torch.optim.SGD):
    """A step that must not be called before its time."""

    def step(self, closure=None):
        raise AssertionError("never called")


@pytest.mark.parametrize("kind", [*UNUSABLE, Inherited, NeedsClosure], ids=lambda kind: kind.__name__)
def test_those_that_need_more_than_dense_gradients_are_refused(kind):
    with pytest.raises(ConfigError) as refused:
        check_can_step(kind(parameters(), lr=0.1))
    said = str(refused.value)
    assert said.startswith(f"The optimizer {kind.__name__} cannot be used: ")
    assert "dense gradients" in said or "closure" in said.split(". It gets")[0]
    assert said.endswith("Use one that needs no more, like torch.optim.AdamW.")


def test_a_differentiable_step_is_refused():
    with pytest.raises(ConfigError, match="SGD cannot be used: a leaf Variable that requires grad"):
        check_can_step(torch.optim.SGD(parameters(), lr=0.1, differentiable=True))


def test_a_step_of_ones_own_is_not_called_nor_a_hook():
    check_can_step(Counts(parameters(), lr=0.1))
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.register_step_post_hook(Counts.step)
    check_can_step(optimizer)


def test_a_trial_does_not_initialize_cuda(monkeypatch):
    """Worker processes for GPUs are forked after it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: pytest.fail("CUDA was asked for"))
    check_can_step(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
