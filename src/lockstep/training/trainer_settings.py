"""The settings of a `Trainer`, and the result of one of its steps."""

import math
from typing import Any

from lockstep.backends import LossFuture
from lockstep.config import RunConfig
from lockstep.core.entry_points import GIVEN
from lockstep.core.errors import ConfigError
from lockstep.data.batch import Batch
from lockstep.training.task import UserObjects
from lockstep.training.train import settings_of

NOT_HERE = ("epochs", "num_epochs", "batch_size", "data", "data_dir", "schedule", "workers", "out", "heal", "trace",
            "checkpoint_every", "keep_checkpoints", "on_hang", "max_restarts", "backend", "num_gpus",
            "sampler", "collate_fn", "on_step", "on_epoch", "logger", "log_every")  # fmt: skip


class StepResult:
    """The result of a step: `step` counts from 1; `loss` is the mean over the batch before the update."""

    def __init__(self, step: int, batch: Batch, future: LossFuture) -> None:
        self.step = step
        self._num_samples, self._future = batch.num_samples, future
        self._loss: float | None = None

    @property
    def loss(self) -> float:
        """Waits for the step, where it is still computed."""
        if self._loss is None:
            total, weights = math.fsum(self._future.result()), self._future.weights
            self._loss = total / (math.fsum(weights) if weights else self._num_samples)
        return self._loss

    @property
    def metrics(self) -> dict[str, float]:
        """The loss and the number of samples, by name."""
        return {"loss": self.loss, "num_samples": self._num_samples}

    def __repr__(self) -> str:
        return f"StepResult(step={self.step}, loss={self.loss:.6g})"


class EverySize(frozenset[int]):
    """Shards of every size."""

    def __contains__(self, size: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True


def trainer_settings(given: dict[str, Any]) -> tuple[RunConfig, UserObjects]:
    """The settings of a run and the user's objects; what belongs to the user's loop is refused."""
    for name in given:
        if name in NOT_HERE:
            raise ConfigError(f"A Trainer has no {name}: batches and epochs are those of your loop. Leave it out.")
    return settings_of({name: value for name, value in given.items() if value is not None})


def is_object(value: Any) -> bool:
    """Whether a setting stands for an object that was given in Python."""
    return isinstance(value, str) and value.endswith(GIVEN)
