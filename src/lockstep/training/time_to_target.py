"""How many samples, and how much time, a run needed until it was good: what another batch size or rate is judged by."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lockstep.core.errors import ConfigError
from lockstep.report.events import EpochDone, Result

GOOD_ENOUGH = 0.95  # of the best
BETTER_THAN_CHANCE = 1.2  # times as many test samples right
SURELY_LEARNED = 0.6  # a cross-entropy that no guess has: that of two equally frequent classes is 0.69
LESS_LOSS = 0.95  # of the first loss, where there is no accuracy


class Target(NamedTuple):
    """When a run is good: at a test accuracy, or where there is none, at a training loss."""

    value: float  # NaN: there is none, as no run has learned anything
    is_accuracy: bool

    def __str__(self) -> str:
        return f"{'accuracy' if self.is_accuracy else 'training loss'} {self.value:.3g}"

    def __bool__(self) -> bool:
        return not math.isnan(self.value)

    def is_reached(self, done: EpochDone) -> bool:
        """Whether an epoch ended with it."""
        found = value_of(done, self.is_accuracy)
        return found is not None and (found >= self.value if self.is_accuracy else found <= self.value)


class Reached(NamedTuple):
    """What it took: up to the end of the first epoch that was good."""

    num_epochs: int
    num_samples: int  # with those that were seen several times
    seconds: float  # of training, without the warm-up


def check_target(target: float | None, is_accuracy: bool) -> None:
    """Refuses what no run could reach."""
    if target is None:
        return
    if not math.isfinite(target) or target <= 0:
        raise ConfigError(f"--target {target:g} is no test accuracy. Write a share of the test samples, like 0.8.")
    if is_accuracy and target > 1:
        raise ConfigError(f"--target {target:g}: a test accuracy is at most 1. Write it like 0.8, not in percent.")


def target_of(results: Sequence[Result], wanted: float | None) -> Target:
    """What is wanted; without a wish, nearly as good as the best at its end, of those that have learned something."""
    is_accuracy = has_accuracy(results)
    finals = [final_value(result, is_accuracy) for result in results if has_learned(result)]
    values = [value for value in finals if math.isfinite(value)]
    if wanted is not None or not values:
        return Target(math.nan if wanted is None else wanted, is_accuracy)
    return Target(GOOD_ENOUGH * max(values) if is_accuracy else min(values) / GOOD_ENOUGH, is_accuracy)


def has_accuracy(results: Sequence[Result]) -> bool:
    """Whether runs are judged by their test accuracy, or else by their training loss."""
    return all(result.test_accuracy is not None for result in results)


def has_learned(result: Result) -> bool:
    """Whether a run ends better than a guess: by its test accuracy, or without one, with less loss than at first.

    Who guesses among C equally frequent classes has the accuracy 1/C and at best the loss ln C: the accuracy is then
    exp(-loss). A model that has learned something has more samples right than that, until its loss is near 0.
    """
    losses = [done.train_loss for done in result.history]
    finite = [loss for loss in (result.first_loss, *losses) if loss is not None and math.isfinite(loss)]
    if not losses or not finite:
        return False
    if result.test_accuracy is not None:
        return min(finite) < SURELY_LEARNED or result.test_accuracy > BETTER_THAN_CHANCE * math.exp(-min(finite))
    return losses[-1] < finite[0] - (1 - LESS_LOSS) * abs(finite[0])


def final_value(result: Result, is_accuracy: bool) -> float:
    """What a run is judged by: its accuracy or loss after the last epoch."""
    found = value_of(result.history[-1], is_accuracy) if result.history else None
    return math.nan if found is None else found


def steady_seconds(history: Sequence[EpochDone]) -> float | None:
    """The median seconds of the epochs after the first, which includes the warm-up; None where there is one epoch."""
    return median(done.seconds for done in history[1:]) if len(history) > 1 else None


def reached(result: Result, target: Target) -> Reached | None:
    """What it took to reach the target; None: it was never reached. The first epoch counts as the later ones do."""
    per_epoch = result.samples_per_second * result.seconds_per_epoch
    steady, seconds = steady_seconds(result.history), 0.0
    for number, done in enumerate(result.history, start=1):
        seconds += min(done.seconds, steady) if number == 1 and steady is not None else done.seconds
        if target.is_reached(done):
            return Reached(number, round(number * per_epoch), seconds)
    return None


def value_of(done: EpochDone, is_accuracy: bool) -> float | None:
    """What an epoch is judged by."""
    return done.test_accuracy if is_accuracy else done.train_loss
