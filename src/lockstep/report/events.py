"""The events of a run: training emits them, reporting decides how they look."""

import math
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.core.layout import Array
from lockstep.report.result_tables import html_table, short, text_table


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
    loss: float = math.nan  # mean over the batch, before the update
    learning_rate: float | None = None  # None where the optimizer has none
    seconds: float = 0.0  # of this epoch's training so far


@dataclass(frozen=True)
class EpochDone:
    """One pass over the data, and the metrics of the test samples after it. `epoch` counts from 1."""

    epoch: int
    seconds: float  # training only, without the evaluation, as the text's timer measures
    train_loss: float  # mean over the samples, each before the update of its batch
    test_accuracy: float | None  # None without test samples, or where accuracy means nothing
    metrics: dict[str, float] = field(default_factory=dict)  # means over the test samples


class History(list[EpochDone]):
    """The epochs of a run, one after the other; it shows itself as a table."""

    def rows(self) -> list[dict[str, Any]]:
        """Plain rows, for a table of your own: epoch, train_loss, test_accuracy, other metrics, seconds."""
        return [
            {"epoch": done.epoch, "train_loss": done.train_loss, "test_accuracy": done.test_accuracy}
            | {f"test_{name}": value for name, value in done.metrics.items() if name != "accuracy"}
            | {"seconds": done.seconds}
            for done in self
        ]

    def table(self) -> list[tuple[str, ...]]:
        """Headings and rows as text; columns that are empty are left out."""
        rows = self.rows()
        names = [name for name in rows[0] if any(row.get(name) is not None for row in rows)] if rows else ["epoch"]
        return [tuple(names), *(tuple(_shown(name, row.get(name)) for name in names) for row in rows)]

    def __repr__(self) -> str:
        return text_table(self.table())

    def _repr_html_(self) -> str:
        return html_table(self.table())


def _shown(name: str, value: Any) -> str:
    if value is None or name == "epoch":
        return "" if value is None else str(value)
    return f"{value:.2f}" if name == "seconds" else short(value)


class TrainedParams(dict[str, Array]):
    """Trained parameters by name, as arrays of numpy; `get_params` copies them into the framework that trained them."""

    backend: str | None = None


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run. It shows itself as a short table; `plot()` draws its curves."""

    test_accuracy: float | None  # None without test samples, or where accuracy means nothing
    seconds_per_epoch: float  # training only
    samples_per_second: float
    backend: str
    backend_version: str
    devices: list[str]
    steps: int
    first_loss: float  # mean over the first batch, before any update: the same in every framework, but for rounding
    weights_sha256: str
    history: list[EpochDone]  # a table with a row for each epoch: epoch, seconds, train_loss, test_accuracy, metrics
    run: Path | None  # the run's folder, where one was asked for
    params: dict[str, Array] = field(repr=False)  # trained, by name, in model order; `get_params` makes tensors of them
    metrics: dict[str, float] = field(default_factory=dict)  # of the test samples, after the last epoch
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes, by device; logical CPU devices share one
    device_memory: list[dict[str, int]] = field(default_factory=list)  # bytes by rank: parameters, gradient, optimizer
    buffers_sha256: str | None = None  # of the model's buffers, like running statistics
    buffers: dict[str, Array] = field(default_factory=dict, repr=False)
    module: Any = field(default=None, repr=False)  # the trained module, where the model is one
    notes: list[str] = field(default_factory=list)  # what may have changed the bits on the way, like another processor
    settings: dict[str, Any] = field(default_factory=dict, repr=False)  # the few that a picture of it names
    ema: dict[str, Array] = field(default_factory=dict, repr=False)  # the moving average of all weights, if asked for
    explanation: dict[str, Any] = field(default_factory=dict, repr=False)  # where the time of a step went, if traced
    trace: list[dict[str, Any]] = field(default_factory=list, repr=False)  # the events of trace.json, without a folder

    def __post_init__(self) -> None:
        object.__setattr__(self, "history", History(self.history))
        params = TrainedParams(self.params)
        params.backend = self.backend
        object.__setattr__(self, "params", params)

    def plot(self) -> Any:
        """The curves of the run as a figure of matplotlib: loss and accuracy against the epoch."""
        pictures = import_module("lockstep.report.run_picture")  # matplotlib takes half a second to load
        return pictures.result_figure(self)

    def explain(self) -> Any:
        """Where the time of a step went, of a run that was traced: `lockstep.explain(result)`."""
        return import_module("lockstep").explain(self)  # which is above this

    def table(self) -> list[tuple[str, str]]:
        """The few numbers that matter."""
        rows = [("", "result")]
        if self.test_accuracy is not None:
            rows.append(("test accuracy", f"{self.test_accuracy:.4f}"))
        rows += [(f"test {name}", f"{value:.4g}") for name, value in self.metrics.items() if name != "accuracy"]
        if self.history:
            rows.append(("training loss", short(self.history[-1].train_loss)))
        rows += [("epochs, steps", f"{len(self.history)}, {self.steps}")]
        rows += [("seconds an epoch", f"{self.seconds_per_epoch:.2f}")]
        rows += [("samples/s", f"{self.samples_per_second:,.0f}"), ("devices", ", ".join(self.devices))]
        rows += [("weights sha256", f"{self.weights_sha256[:16]}...")]
        return [*rows, ("run", str(self.run))] if self.run is not None else rows

    def __repr__(self) -> str:
        return text_table(self.table()[1:])

    def _repr_html_(self) -> str:
        return html_table(self.table())

    def summary(self) -> dict[str, Any]:
        """The result as plain values, without the weights."""
        plain = asdict(replace(self, params={}, buffers={}, module=None, ema={}, trace=[]))  # asdict would copy them
        plain["history"] = list(plain["history"])
        left_out = ("params", "buffers", "module", "ema", "trace")
        return {name: value for name, value in plain.items() if name not in left_out}

    def lines(self) -> str:
        """The two lines that a run ends with, in the text's own form."""
        reached = f"train loss: {self.history[-1].train_loss:.4g}" if self.history else f"{self.steps} steps"
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
    """What every rank did, from when to when, and where the time of a step went."""

    chrome: list[dict[str, Any]]  # in the format of Chrome and Perfetto
    sentence: str
    lines: list[str] = field(default_factory=list)  # the same as a table
    explanation: dict[str, Any] = field(default_factory=dict)  # its figures


Event = RunStarted | StepDone | EpochDone | RunDone | RunStopped | Incident | Traced
