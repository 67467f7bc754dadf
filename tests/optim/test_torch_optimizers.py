"""Learning rates of a module, step by step, against a plain loop: schedules by name, schedulers, parameter groups."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

import lockstep
from lockstep.data.order import sample_order
from lockstep.optim.lr_schedule import LRSchedule

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
