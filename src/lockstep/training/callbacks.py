"""Functions of the user's that are called during a run: `on_step` after every update, `on_epoch` after every epoch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.core.errors import ConfigError, LockstepError, RunError
from lockstep.core.layout import Array
from lockstep.core.source_lines import at, user_source_line
from lockstep.data.batch import BatchSource
from lockstep.training.evaluate import evaluate, evaluate_batches
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.task import Task


class Now(NamedTuple):
    """The model as it is at the moment of a callback, in the process of rank 0."""

    replicas: ReplicaSet
    task: Task
    test_set: BatchSource | None
    batch_size: int

    def evaluate(self, data: Any) -> dict[str, float]:
        """The loss and metrics of `data`, or of the test samples; the other ranks wait."""
        how = self.task.eval_spec
        if data is not None:
            if self.task.given_batch is None:
                hint = "Leave them out for the run's test samples"
                raise ConfigError(f"{self.task.model} is written for every framework and evaluates no batches. {hint}.")
            batches = map(self.task.given_batch(self.replicas.engine), batches_in(data))
            return evaluate_batches(self.replicas, batches, how, is_alone=True)
        if self.test_set is None:
            raise ConfigError(
                "There are no test samples to evaluate. Give evaluate some batches, or the run both parts."
            )
        return evaluate(self.replicas, self.test_set, how, self.batch_size, is_alone=True)


@dataclass
class RunState:
    """A run at the moment of a callback."""

    epoch: int  # from 1
    step: int  # updates so far
    loss: float  # of on_step: the batch's mean, before its update; of on_epoch: the mean over the epoch
    metrics: dict[str, float]  # of on_epoch: those of the test samples
    _now: Now = field(repr=False)
    is_stopped: bool = False

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """The loss and metrics now: of the run's test samples, or of `data`, as `Trainer.evaluate` takes it."""
        return self._now.evaluate(data)

    def weights(self) -> dict[str, Array]:
        """All parameters and buffers by name, as they are now."""
        return self._now.task.whole(self._now.replicas.weights())

    def stop(self) -> None:
        """Ends the run after this callback; its result is that of the weights as they are now."""
        self.is_stopped = True


class Callbacks(NamedTuple):
    """What is called when. With several processes, only that of rank 0 calls them."""

    on_step: Callable[[RunState], Any] | None = None
    on_epoch: Callable[[RunState], Any] | None = None

    def checked(self) -> "Callbacks":
        """The same; refuses what cannot be called."""
        for name, callback in self._asdict().items():
            if callback is not None and not callable(callback):
                raise ConfigError(f"{name} is a {type(callback).__name__}. Give a function of the run's state.")
        return self

    def call(self, name: str, run: RunState) -> bool:
        """Calls one of them; whether the run is to stop."""
        try:
            getattr(self, name)(run)
        except LockstepError:
            raise
        except Exception as problem:
            what = f"{type(problem).__name__}: {problem}{at(user_source_line(problem))}"
            raise RunError(f"{name} failed after step {run.step}: {what}") from problem
        return run.is_stopped


def batches_in(data: Any) -> Iterable[Any]:
    """The batches to evaluate: a DataLoader, a list, or one batch as a pair or dict."""
    is_one = isinstance(data, (tuple, dict)) or (isinstance(data, list) and len(data) > 1 and hasattr(data[0], "shape"))
    batches = [data] if is_one else data
    if not isinstance(batches, Iterable):
        raise ConfigError(f"evaluate got a {type(data).__name__}. Give batches: a DataLoader, or (inputs, target).")
    return batches
