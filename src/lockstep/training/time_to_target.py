"""How many samples, and how much time, a run needed until it was good: what another batch size or rate is judged by."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.core.errors import ConfigError
from lockstep.report.events import EpochDone, Result

GOOD_ENOUGH = 0.95  # of the best


class Target(NamedTuple):
    """When a run is good: at a test accuracy, or where there is none, at a training loss."""

    value: float
    is_accuracy: bool

    def __str__(self) -> str:
        return f"{'accuracy' if self.is_accuracy else 'training loss'} {self.value:.3g}"

    def is_reached(self, done: EpochDone) -> bool:
        """Whether an epoch ended with it."""
        found = value_of(done, self.is_accuracy)
        return found is not None and (found >= self.value if self.is_accuracy else found <= self.value)


class Reached(NamedTuple):
    """What it took: up to the end of the first epoch that was good."""

    num_epochs: int
    num_samples: int  # with those that were seen several times
    seconds: float  # of training


def check_target(target: float | None, is_accuracy: bool) -> None:
    """Refuses what no run could reach."""
    if target is None:
        return
    if not math.isfinite(target) or target <= 0:
        raise ConfigError(f"--target {target:g} is no test accuracy. Write a share of the test samples, like 0.8.")
    if is_accuracy and target > 1:
        raise ConfigError(f"--target {target:g}: a test accuracy is at most 1. Write it like 0.8, not in percent.")


def target_of(results: Sequence[Result], wanted: float | None) -> Target:
    """What is wanted; without a wish, nearly as good as the best of them at its end."""
    is_accuracy = all(result.test_accuracy is not None for result in results)
    finals = [value_of(result.history[-1], is_accuracy) for result in results if result.history]
    values = [value for value in finals if value is not None and math.isfinite(value)]
    if wanted is not None or not values:
        return Target(math.nan if wanted is None else wanted, is_accuracy)
    return Target(GOOD_ENOUGH * max(values) if is_accuracy else min(values) / GOOD_ENOUGH, is_accuracy)


def reached(result: Result, target: Target) -> Reached | None:
    """What it took to reach the target; None: it was never reached."""
    per_epoch = result.samples_per_second * result.seconds_per_epoch
    seconds = 0.0
    for number, done in enumerate(result.history, start=1):
        seconds += done.seconds
        if target.is_reached(done):
            return Reached(number, round(number * per_epoch), seconds)
    return None


def value_of(done: EpochDone, is_accuracy: bool) -> float | None:
    """What an epoch is judged by."""
    return done.test_accuracy if is_accuracy else done.train_loss
