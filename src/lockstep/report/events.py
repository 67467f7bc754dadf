"""The events of a run: training emits them, reporting decides how they look."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.core.layout import Array


@dataclass(frozen=True)
class RunStarted:
    """Everything is checked and ready; the first step is next."""

    config: dict[str, Any]
    data_sha256: str | None  # None where the samples are not in memory
    backend_version: str
    devices: list[str]
    num_train_samples: int
    num_test_samples: int
    num_parameters: int
    steps_per_epoch: int
    keeps_bits: bool  # whether the exchange adds in the tree's order
    model: str = ""  # its name, where the settings have none
    made_with: dict[str, str] = field(default_factory=dict)  # what decides how it rounds: versions, processor, settings
    notes: list[str] = field(default_factory=list)  # what the user should know before it starts
    step: int = 0  # steps that are done already, of a run that is resumed
    num_restarts: int = 0  # how often it continued with other workers


@dataclass(frozen=True)
class StepDone:
    """One update. `step` counts from 1 over the whole run."""

    epoch: int
    step: int
    num_samples: int


@dataclass(frozen=True)
class EpochDone:
    """One pass over the data, and the metrics of the test samples after it. `epoch` counts from 1."""

    epoch: int
    seconds: float  # training only, without the evaluation, as the text's timer measures
    train_loss: float  # mean over the samples, each before the update of its batch
    test_accuracy: float | None  # None without test samples, or where accuracy means nothing
    metrics: dict[str, float] = field(default_factory=dict)  # means over the test samples


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    test_accuracy: float | None  # None without test samples, or where accuracy means nothing
    seconds_per_epoch: float  # training only
    samples_per_second: float
    backend: str
    backend_version: str
    devices: list[str]
    steps: int
    first_loss: float  # mean over the first batch, before any update: the same in every framework, but for rounding
    weights_sha256: str
    history: list[EpochDone]  # epoch, seconds, train_loss, test_accuracy, metrics of each epoch
    run: Path | None  # the run's folder, where one was asked for
    params: dict[str, Array] = field(repr=False)  # the trained parameters by name, in model order
    metrics: dict[str, float] = field(default_factory=dict)  # of the test samples, after the last epoch
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes, by device; logical CPU devices share one
    buffers_sha256: str | None = None  # of the model's buffers, like running statistics
    buffers: dict[str, Array] = field(default_factory=dict, repr=False)
    module: Any = field(default=None, repr=False)  # the trained module, where the model is one
    notes: list[str] = field(default_factory=list)  # what may have changed the bits on the way, like another processor
    ema: dict[str, Array] = field(default_factory=dict, repr=False)  # the moving average of all weights, if asked for

    def summary(self) -> dict[str, Any]:
        """The result as plain values, without the weights."""
        plain = asdict(replace(self, params={}, buffers={}, module=None, ema={}))  # asdict would copy the weights
        return {name: value for name, value in plain.items() if name not in ("params", "buffers", "module", "ema")}

    def lines(self) -> str:
        """The two lines that a run ends with, in the text's own form."""
        reached = f"train loss: {self.history[-1].train_loss:.4g}"
        if self.test_accuracy is not None:
            reached = f"test acc: {self.test_accuracy:.2f}"
        elif self.metrics:
            reached = ", ".join(f"test {name}: {value:.4g}" for name, value in self.metrics.items())
        first = f"{reached}, {self.seconds_per_epoch:.1f} sec/epoch on [{', '.join(self.devices)}]"
        return f"{first}\nweights sha256: {self.weights_sha256}"


@dataclass(frozen=True)
class RunDone:
    """The last event of a run."""

    result: Result


@dataclass(frozen=True)
class RunStopped:
    """The run stopped before its end, after `step`. An error follows."""

    epoch: int
    step: int
    reason: str
    history: list[EpochDone]  # the epochs that were finished
    weights: dict[str, Array] = field(repr=False)  # parameters and buffers after the last of them, if any


@dataclass(frozen=True)
class Incident:
    """Something happened that the user should know, and the run continues."""

    kind: str  # the event's name in metrics.jsonl: eager, prepared, healed, balance, ...
    sentence: str


@dataclass(frozen=True)
class Traced:
    """What every rank did, from when to when, and what a perfect speed-up was lost to."""

    chrome: list[dict[str, Any]]  # in the format of Chrome and Perfetto
    sentence: str


Event = RunStarted | StepDone | EpochDone | RunDone | RunStopped | Incident | Traced
