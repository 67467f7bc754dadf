"""Curves for other programs: TensorBoard, or any object with the methods of Lightning's loggers.

Loggers of Lightning (CSV, Weights & Biases, MLflow, ...) have `log_hyperparams(params)`, `log_metrics(metrics, step)`
and `finalize(status)`. They are called in one process, that of rank 0; what they raise ends the run and says so.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lockstep.core.errors import ConfigError, LockstepError, RunError
from lockstep.core.source_lines import at, user_source_line
from lockstep.report.events import EpochDone, Event, RunDone, RunStarted, RunStopped, StepDone
from lockstep.report.runlog import plain
from lockstep.report.step_sampling import StepSampling

TENSORBOARD = "tensorboard"
METHODS = ("log_hyperparams", "log_metrics", "finalize")


class Logger(Protocol):
    """What Lightning's loggers can do."""

    def log_hyperparams(self, params: dict[str, Any]) -> Any:
        """Called once, with the settings of the run."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> Any:
        """Called now and then, and after every epoch."""

    def finalize(self, status: str) -> Any:
        """Called at the end: success, or failed."""


class TensorBoard:
    """Writes event files that TensorBoard reads. A run that is resumed continues its curves."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as problem:
            raise ConfigError(
                "--logger tensorboard needs the package tensorboardX. Install it: pip install tensorboardX."
            ) from problem
        self._folder, self._make, self._writer = folder, SummaryWriter, None
        self.first_step = 1  # what an interrupted run had written from here on is replaced

    @property
    def writer(self) -> Any:
        """Made when it is first used: in the process that logs.

        A file is named after the second it is made in, in which a run may have been interrupted and resumed.
        """
        if self._writer is None:
            how = {"purge_step": self.first_step, "filename_suffix": f".{self.first_step:09}", "flush_secs": 10}
            self._writer = self._make(str(self._folder), **how)
        return self._writer

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """The settings, as a table."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in params.items() if value is not None)
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", self.first_step - 1)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """A point on each curve."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finalize(self, status: str) -> None:
        """Closes the file."""
        self.writer.close()


class LoggerSink:
    """Calls loggers with what they want to know of a run's events."""

    def __init__(self, loggers: list[Any]) -> None:
        self._loggers = loggers
        self._steps: StepSampling | None = None
        self._step = 0

    def write(self, event: Event) -> None:
        """Tells them about one event."""
        match event:
            case RunStarted():
                self._steps, self._step = StepSampling(event), event.step
                for logger in self._loggers:
                    if isinstance(logger, TensorBoard):
                        logger.first_step = event.step + 1
                about = {"model_name": event.model, "devices": ",".join(event.devices)}
                about |= {"num_parameters": str(event.num_parameters), "backend_version": event.backend_version}
                self._call("log_hyperparams", {**plain(event.config), **about})
            case StepDone():
                self._step = event.step
                if self._steps is not None and (values := self._steps.sampled(event)):
                    renamed = {"train_loss" if name == "loss" else name: value for name, value in values.items()}
                    self._log({**renamed, "epoch": event.epoch})
            case EpochDone():
                tested = {f"test_{name}": value for name, value in event.metrics.items()}
                if event.test_accuracy is not None:
                    tested["test_accuracy"] = event.test_accuracy
                times = {"seconds_per_epoch": event.seconds, "epoch": event.epoch}
                self._log({"epoch_train_loss": event.train_loss, **tested, **times})
                self._call("save", optional=True)
            case RunDone():
                self._call("finalize", "success")
            case RunStopped():
                with contextlib.suppress(RunError):  # the error that stopped the run matters more
                    self._call("finalize", "failed")

    def _log(self, values: dict[str, Any]) -> None:
        self._call("log_metrics", {name: value for name, value in values.items() if value is not None}, step=self._step)

    def _call(self, name: str, *arguments: Any, optional: bool = False, **named: Any) -> None:
        for logger in self._loggers:
            if optional and not hasattr(logger, name):
                continue
            try:
                getattr(logger, name)(*arguments, **named)
            except LockstepError:
                raise
            except Exception as problem:
                what = f"the logger {type(logger).__name__} failed in {name} after step {self._step}"
                why = f"{type(problem).__name__}: {problem}{at(user_source_line(problem))}"
                raise RunError(f"{what}: {why}") from problem


def find_loggers(given: Any, out: Path | None, load: Callable[[str], Any]) -> LoggerSink | None:
    """What logs a run: `given` is a name, an entry point that `load` loads, an object, or a list of such."""
    loggers = []
    for entry in given if isinstance(given, (list, tuple)) else [given]:
        if entry is None or entry is False:
            continue
        if entry == TENSORBOARD:
            if out is None:
                raise ConfigError("The logger tensorboard writes to the run's folder: name one (--out, out=...).")
            loggers.append(TensorBoard(out / "tensorboard"))
            continue
        logger = load(entry) if isinstance(entry, str) else entry
        if missing := [name for name in METHODS if not callable(getattr(logger, name, None))]:
            raise ConfigError(
                f"The logger is a {type(logger).__name__} without {missing[0]}. Give tensorboard, or an object with "
                f"the methods of Lightning's loggers: {', '.join(METHODS)}."
            )
        loggers.append(logger)
    return LoggerSink(loggers) if loggers else None
