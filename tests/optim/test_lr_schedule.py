"""The learning rate over the run."""

import math

import pytest

from lockstep.optim.lr_schedule import SCHEDULES, LRSchedule


def factors(**settings):
    return [LRSchedule(**settings).factor(step) for step in range(1, settings["num_steps"] + 1)]


def test_a_warm_up_is_linear_and_the_schedule_starts_at_the_full_value():
    assert factors(warmup=4, num_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    for schedule in SCHEDULES:
        assert factors(schedule=schedule, warmup=4, num_steps=10)[3:5] == [1.0, 1.0]


def test_cosine_and_linear_fall_towards_zero():
    cosine = factors(schedule="cosine", num_steps=100)
    assert cosine[0] == 1.0
    assert cosine[50] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[-1] == pytest.approx((1 + math.cos(math.pi * 0.99)) / 2)
    assert factors(schedule="linear", num_steps=4) == [1.0, 0.75, 0.5, 0.25]


def test_a_warm_up_may_be_longer_than_the_run():
    assert factors(schedule="cosine", warmup=10, num_steps=3) == [0.1, 0.2, 0.3]
