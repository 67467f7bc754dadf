"""Test accuracy on all devices, each sample counted exactly once: the text's fourth exercise.

The samples are cut into pieces of a fixed size whatever the number of devices, so a sample meets the same kernels, and
gets the same answer, on any of them. The count is a whole number: adding it up has no order.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.backends import Tensor, devices_for, load_backend
from lockstep.data import load_dataset
from lockstep.data.sources import Progress, no_progress
from lockstep.device import Device
from lockstep.engines import Batch, Engine, InProcess
from lockstep.errors import ConfigError, DataError
from lockstep.layout import Array, Layout, layout_of, sha256_of
from lockstep.models import MODELS, Forward, Model
from lockstep.registry import pick
from lockstep.report.runlog import read_run
from lockstep.samples import Samples
from lockstep.split.batch import split_into_shards
from lockstep.split.ranks import split_over_ranks

PIECE = 256  # samples that go through the model together; part of the answer's definition, like the number of shards


def num_correct(engine: Engine, forward: Forward, layout: Layout, replicas: list[Tensor], samples: Batch) -> int:
    """How many of the samples get their own label as the highest score."""
    pieces = split_into_shards(samples.num_samples, -(-samples.num_samples // PIECE))
    ranges = split_over_ranks(len(pieces), engine.num_ranks)
    backend = engine.backend
    scores = backend.capture(forward) if backend.capabilities.capture else forward

    def count(rank: int, device: Device, flat: Tensor) -> int:
        params = backend.unflatten(layout, flat)
        correct = 0
        for number in ranges[rank]:
            X, y = samples.fetch(rank, pieces[number].start, pieces[number].stop)
            correct = correct + backend.ops.num_correct(scores(X, params), y)
        return int(correct)

    return sum(engine.gather(engine.each("evaluation", count, replicas)))


@dataclass(frozen=True)
class Evaluation:
    """The accuracy of a finished run's weights."""

    test_accuracy: float
    num_correct: int
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
        return (
            f"test acc: {self.test_accuracy:.4f} ({self.num_correct} of {self.num_samples}) "
            f"on [{', '.join(self.devices)}]\n"
            f"weights sha256: {self.weights_sha256}"
        )


def evaluate_run(
    folder: Path,
    devices: str | None = None,
    data_dir: Path | None = None,
    backend_name: str | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """How many test samples the run in `folder` gets right: the same on any devices, nearly so in any framework."""
    settings, weights = read_run(folder)
    model = pick(MODELS, _recorded(settings, "model", folder), "model")
    backend = load_backend(backend_name or _recorded(settings, "backend", folder))
    places = devices_for(backend, devices)
    params = checked_weights(model, weights, folder)
    layout = layout_of(params)
    if data_dir is None and isinstance(settings.get("data_dir"), str):
        data_dir = Path(settings["data_dir"])
    data = load_dataset(_recorded(settings, "data", folder), data_dir, progress)
    if settings.get("data_sha256", data.sha256) != data.sha256:
        raise DataError(f"{data.name} is not the data that the run in {folder} was trained on: its bytes are others.")
    model.check(data)
    with InProcess(backend, places) as engine:
        replicas = engine.replicate(layout.flatten(list(params.values())))
        test_set = Samples(engine, data.X_test, data.y_test)
        correct = num_correct(engine, model.forward, layout, replicas, test_set.all())
    return Evaluation(
        test_accuracy=correct / len(data.X_test),
        num_correct=correct,
        num_samples=len(data.X_test),
        backend=backend.name,
        backend_version=backend.version(),
        devices=[str(place) for place in places],
        weights_sha256=sha256_of(list(params.values())),
        run=folder,
    )


def _recorded(settings: dict[str, Any], name: str, folder: Path) -> str:
    value = settings.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{folder}/config.json has {value!r} as its {name}; a run's folder has a name there.")
    return value


def checked_weights(model: Model, weights: dict[str, Array], folder: Path) -> dict[str, Array]:
    """The weights in model order, once names, shapes and types were found to be the model's."""
    expected = model.init(0)
    if set(weights) != set(expected):
        raise ConfigError(
            f"{folder}/weights.safetensors has {', '.join(sorted(weights)) or 'no tensors'}, and {model.name} needs "
            f"{', '.join(expected)}."
        )
    for name, array in expected.items():
        if weights[name].shape != array.shape or weights[name].dtype != np.float32:
            raise ConfigError(
                f"{folder}/weights.safetensors: {name} is {weights[name].dtype} of shape {weights[name].shape}, and "
                f"{model.name} needs float32 of shape {array.shape}."
            )
    return {name: weights[name] for name in expected}
