"""Metrics on all devices, each test sample counted exactly once: the text's fourth exercise.

The samples are cut into pieces of a fixed size whatever the number of devices, so a sample meets the same kernels, and
gets the same answer, on any of them. The pieces' sums are added with one rounding, at the end: that has no order.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import RunConfig
from lockstep.data.sources import Progress, no_progress
from lockstep.core.device import Device
from lockstep.runtime import Batch, Engine, InProcess, Replica
from lockstep.core.errors import ConfigError, DataError
from lockstep.core.layout import Array, sha256_of
from lockstep.core.entry_points import is_place
from lockstep.training.setup import prepare
from lockstep.report.runlog import read_run
from lockstep.data.resident import Feed, lost_loaders
from lockstep.partition.batch import split_into_shards
from lockstep.partition.ranks import split_over_ranks


def measure(engine: Engine, replicas: Sequence[Replica], batches: Iterable[Batch], piece: int) -> dict[str, float]:
    """Every metric, as the mean over the samples of all batches, `piece` samples being computed together."""
    sums: dict[str, list[float]] = {}
    num_samples = 0
    for batch in batches:
        num_samples += batch.num_samples
        pieces = cut_into_pieces(batch.num_samples, piece)
        ranges = split_over_ranks(len(pieces), engine.num_ranks)

        def work(rank: int, device: Device, replica: Replica) -> list[dict[str, float]]:
            places = [pieces[number] for number in ranges[rank]]  # noqa: B023 - used within this turn of the loop
            return [replica.measure(*batch.fetch(rank, at.start, at.stop)) for at in places]  # noqa: B023

        for own in engine.gather(engine.each("evaluation", work, replicas)):
            for measured in own:
                for name, value in measured.items():
                    sums.setdefault(name, []).append(value)
    return {name: math.fsum(values) / num_samples for name, values in sums.items()}


def measure_all(
    engine: Engine, replicas: Sequence[Replica], feed: Feed, piece: int, batch_size: int
) -> dict[str, float]:
    """Every metric, as the mean over all samples of `feed`, in their own order."""
    size = feed.num_samples if feed.in_memory else batch_size
    order = np.arange(feed.num_samples)
    return measure(engine, replicas, feed.batches(order, size, lambda n: cut_into_pieces(n, piece), epoch=0), piece)


def cut_into_pieces(num_samples: int, piece: int) -> list[range]:
    """Parts of at most `piece` samples, whose sizes differ by at most one."""
    return split_into_shards(num_samples, -(-num_samples // piece))


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
        """Two lines, like those that the run ended with."""
        what = ", ".join(f"test {name}: {value:.6g}" for name, value in self.metrics.items() if name != "accuracy")
        if self.test_accuracy is not None:
            correct = self.test_accuracy * self.num_samples
            counted = f" ({round(correct)} of {self.num_samples})" if abs(correct - round(correct)) < 1e-6 else ""
            what = f"test acc: {self.test_accuracy:.4f}{counted}" + (f", {what}" if what else "")
        return f"{what} on [{', '.join(self.devices)}]\nweights sha256: {self.weights_sha256}"


def evaluate_run(
    folder: Path,
    devices: str | None = None,
    data_dir: Path | None = None,
    backend_name: str | None = None,
    progress: Progress = no_progress,
    places: dict[str, str] | None = None,
) -> Evaluation:
    """The metrics of the run in `folder`: the same on any devices, nearly so in any framework.

    `places` are the `package.file:function` of the run's own model, data or loss: code is never run because a file
    names it.
    """
    settings, weights = read_run(folder)
    config = _recorded_config(settings, folder, places or {}, devices=devices)
    if data_dir is not None or backend_name is not None:
        replaced = {"data_dir": data_dir, "backend": backend_name}
        config = RunConfig(
            **{**asdict(config), **{name: value for name, value in replaced.items() if value is not None}}
        )
    backend, found, task = prepare(config, progress=progress, trains=False)
    if task.test_set is None:
        raise DataError(f"{config.data} has no test samples to evaluate the run in {folder} on.")
    if task.data_sha256 is not None and settings.get("data_sha256") not in (None, task.data_sha256):
        raise DataError(f"{config.data} is not the data that the run in {folder} was trained on: its bytes are others.")
    state = checked_weights(task.initial, weights, folder / "weights.safetensors", config.model)
    with InProcess(backend, found) as engine:
        replicas = engine.replicate(lambda device: task.replica(device, state, None))
        feed = task.test_set(engine)
        with closing(feed), lost_loaders():
            metrics = measure_all(engine, replicas, feed, task.piece, config.batch_size)
    return Evaluation(
        test_accuracy=metrics.get("accuracy"),
        metrics=metrics,
        num_samples=task.num_test,
        backend=backend.name,
        backend_version=backend.version(),
        devices=[str(place) for place in found],
        weights_sha256=sha256_of([state[name] for name in task.parameters]),
        run=folder,
    )


def _recorded_config(settings: dict[str, Any], folder: Path, places: dict[str, str], **now: Any) -> RunConfig:
    """The settings in a run's record, which may be anybody's file."""
    known = {field.name: field.type for field in fields(RunConfig)}
    recorded = {name: value for name, value in settings.items() if name in known and value is not None}
    for name in ("model", "data", "backend"):
        if not isinstance(recorded.get(name), str):
            raise ConfigError(
                f"{folder}/config.json has {recorded.get(name)!r} as its {name}; a run's folder has a name there."
            )
    for name in ("model", "data", "loss"):
        value = recorded.get(name, "")
        if name in places:
            recorded[name] = places[name]
        elif isinstance(value, str) and value.endswith(" given in Python"):
            raise ConfigError(
                f"The {name} of the run in {folder} was {value}, and is not in the record. Name a function that makes "
                f"it: --{name} package.file:function."
            )
        elif isinstance(value, str) and is_place(value):
            raise ConfigError(
                f"The {name} of the run in {folder} is code of your own, {value}. A record does not decide what code "
                f"is run: add --{name} {value}."
            )
    for name in ("out", "engine", "exchange", "devices", "workers", "optimizer", "learning_rate", "momentum"):
        recorded.pop(name, None)  # of no consequence here
    try:
        return RunConfig(**{**recorded, **now})
    except (TypeError, ValueError, AttributeError) as problem:
        raise ConfigError(f"{folder}/config.json does not hold the settings of a run: {problem}.") from problem


def checked_weights(expected: dict[str, Array], found: dict[str, Array], file: Path, model: str) -> dict[str, Array]:
    """The weights in model order, once names, shapes and types were found to be the model's."""
    if set(found) != set(expected):
        raise ConfigError(
            f"{file} has {_few(sorted(found)) or 'no tensors'}, and {model} needs {_few(list(expected))}."
        )
    for name, array in expected.items():
        if found[name].shape != array.shape or found[name].dtype != array.dtype:
            raise ConfigError(
                f"{file}: {name} is {found[name].dtype} of shape {found[name].shape}, and "
                f"{model} needs {array.dtype} of shape {array.shape}."
            )
    return {name: found[name] for name in expected}


def _few(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
