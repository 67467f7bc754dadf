"""`lockstep evaluate`: the metrics of a finished run, from the files in its folder."""

from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.core.entry_points import GIVEN, is_entry_point
from lockstep.core.errors import ConfigError, DataError
from lockstep.core.layout import sha256_of
from lockstep.data.batch import loader_errors
from lockstep.data.sources import Progress, no_progress
from lockstep.partition.placement import Part
from lockstep.report.runlog import read_run, read_weights
from lockstep.runtime.inprocess import InProcess
from lockstep.training.checkpoint import max_bytes_of
from lockstep.training.evaluate import evaluate
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.setup import prepare
from lockstep.training.weights import checked_weights

NOT_NEEDED = ("out", "engine", "exchange", "devices", "workers", "optimizer", "learning_rate", "momentum", "split",
              "stages", "update")  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a finished run's weights."""

    test_accuracy: float | None
    metrics: dict[str, float]  # means over the test samples
    num_samples: int
    backend: str
    backend_version: str
    devices: list[str]
    weights_sha256: str
    run: Path

    def summary(self) -> dict[str, Any]:
        """The evaluation as plain values."""
        return asdict(self)

    def lines(self) -> str:
        """Two lines, in the form of those that a run ends with."""
        what = ", ".join(f"test {name}: {value:.6g}" for name, value in self.metrics.items() if name != "accuracy")
        if self.test_accuracy is not None:
            correct = self.test_accuracy * self.num_samples
            counted = f" ({round(correct)} of {self.num_samples})" if abs(correct - round(correct)) < 1e-6 else ""
            what = f"test acc: {self.test_accuracy:.4f}{counted}" + (f", {what}" if what else "")
        return f"{what} on [{', '.join(self.devices)}]\nweights sha256: {self.weights_sha256}"


def evaluate_run(
    folder: Path, changed: dict[str, Any], entry_points: dict[str, str], progress: Progress = no_progress
) -> Evaluation:
    """The metrics of the run in `folder`: the same bits on any devices, close in any framework.

    Settings that are `changed` (devices, data_dir, backend) replace the run's. Its model, data or loss are named as
    `entry_points`: a file never names code to run.
    """
    settings = read_run(folder)
    config = _recorded_config(settings, folder, {**changed, **entry_points})
    backend, devices, task, _ = prepare(config, progress=progress, trains=False)
    if task.test_set is None:
        raise DataError(f"{config.data} has no test samples to evaluate the run in {folder} on.")
    if task.data_sha256 is not None and settings.get("data_sha256") not in (None, task.data_sha256):
        raise DataError(f"{config.data} is not the data that the run in {folder} was trained on (its SHA-256 differs).")
    weights = read_weights(folder, max_bytes_of(task.initial))
    state = checked_weights(task.whole(task.initial), weights, folder / "weights.safetensors", config.model)
    units = task.sliced(state)
    with InProcess(backend, devices) as engine:
        made = engine.each("replicate", lambda rank, device: task.replica(device, units, None, Part()))
        replicas = ReplicaSet(engine, made)
        with closing(task.test_set(engine)) as test_set, loader_errors():
            metrics = evaluate(replicas, test_set, task.eval_spec, config.batch_size)
    return Evaluation(
        test_accuracy=metrics.get("accuracy"),
        metrics=metrics,
        num_samples=task.num_test,
        backend=backend.name,
        backend_version=backend.version(),
        devices=[str(device) for device in devices],
        weights_sha256=sha256_of([state[name] for name in task.parameters]),
        run=folder,
    )


def _recorded_config(settings: dict[str, Any], folder: Path, changed: dict[str, Any]) -> RunConfig:
    """The settings in config.json, which is not trusted."""
    known = {field.name for field in fields(RunConfig)}.difference(NOT_NEEDED)
    recorded = {name: value for name, value in settings.items() if name in known and value is not None}
    for name in ("model", "data", "backend"):
        if not isinstance(value := recorded.get(name), str):
            raise ConfigError(f"{folder}/config.json has {value!r} as its {name}; a run's folder has a name there.")
    for name in ("model", "data", "loss"):
        value = "" if name in changed else str(recorded.get(name, ""))
        if is_entry_point(value) or value.endswith(GIVEN):
            wanted = value if is_entry_point(value) else "package.module:function"
            what = f"The {name} of the run in {folder} is code of your own, {value}"
            raise ConfigError(
                f"{what}. Lockstep never imports code that only config.json names: add --{name} {wanted}."
            )
    try:
        return RunConfig(**{**recorded, **changed})
    except (TypeError, ValueError, AttributeError) as problem:
        raise ConfigError(f"{folder}/config.json does not hold the settings of a run: {problem}.") from problem
