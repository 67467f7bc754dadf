"""Learning-rate schedules: a linear warm-up, then constant, cosine or linear."""

import math
from collections.abc import Callable
from dataclasses import dataclass

SCHEDULES: dict[str, Callable[[float], float]] = {  # fraction of the run after the warm-up, 0 to 1 -> factor
    "constant": lambda part: 1.0,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
    "linear": lambda part: 1 - part,
}


@dataclass(frozen=True)
class LRSchedule:
    """The factor of the learning rate in each step.

    >>> schedule = LRSchedule("cosine", warmup=2, num_steps=6)
    >>> [round(schedule.factor(step), 2) for step in range(1, 7)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """

    schedule: str = "constant"
    warmup: int = 0  # steps in which the learning rate grows linearly to its full value
    num_steps: int = 1  # of the whole run

    def is_constant_from(self, step: int) -> bool:
        """Whether the factor stays the same from step number `step` on."""
        return self.schedule == "constant" and step >= self.warmup

    def factor(self, step: int) -> float:
        """The factor for step number `step`, from 1 on."""
        if step <= self.warmup:
            return step / self.warmup
        done = (step - 1 - self.warmup) / max(1, self.num_steps - self.warmup)
        return SCHEDULES[self.schedule](min(1.0, done))
