"""What training says while it works: records. Reporting decides how they look."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.layout import Array


@dataclass(frozen=True)
class RunStarted:
    """Everything was checked and is in place; the first step is next."""

    config: dict[str, Any]
    data_sha256: str
    backend_version: str
    devices: list[str]
    num_train_samples: int
    num_test_samples: int
    num_parameters: int
    steps_per_epoch: int
    keeps_bits: bool  # whether the exchange adds in the tree's order


@dataclass(frozen=True)
class StepDone:
    """One update. `step` counts from 1 over the whole run."""

    epoch: int
    step: int
    num_samples: int


@dataclass(frozen=True)
class EpochDone:
    """One pass over the data, and the test accuracy after it. `epoch` counts from 1."""

    epoch: int
    seconds: float  # training only, without the evaluation, as the text's timer measures
    train_loss: float  # mean over the samples, as they were when their batch came
    test_accuracy: float


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    test_accuracy: float
    seconds_per_epoch: float  # training only
    samples_per_second: float
    backend: str
    backend_version: str
    devices: list[str]
    steps: int
    first_loss: float  # mean over the first batch, before any update: the same in every framework, but for rounding
    weights_sha256: str
    history: list[EpochDone]  # epoch, seconds, train_loss, test_accuracy of each epoch
    run: Path | None  # the run's folder, where one was asked for
    params: dict[str, Array] = field(repr=False)  # the trained parameters by name, in model order

    def summary(self) -> dict[str, Any]:
        """The result as plain values, without the parameters."""
        plain = asdict(replace(self, params={}))  # asdict copies what it finds: not the weights
        del plain["params"]
        return plain

    def lines(self) -> str:
        """The two lines that a run ends with, in the text's own form."""
        devices = ", ".join(self.devices)
        return (
            f"test acc: {self.test_accuracy:.2f}, {self.seconds_per_epoch:.1f} sec/epoch on [{devices}]\n"
            f"weights sha256: {self.weights_sha256}"
        )


@dataclass(frozen=True)
class RunDone:
    """The last event of a run."""

    result: Result


@dataclass(frozen=True)
class RunStopped:
    """The run cannot go on; this is what there is of it. An error follows."""

    epoch: int
    step: int
    reason: str
    history: list[EpochDone]  # the epochs that were finished
    params: dict[str, Array] = field(repr=False)  # the parameters after the last of them; none before the first


Event = RunStarted | StepDone | EpochDone | RunDone | RunStopped
