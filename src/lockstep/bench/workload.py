"""What every contender does in a trial: the same steps on the same samples of the same data."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array
from lockstep.core.registry import pick
from lockstep.data import Dataset, load_dataset
from lockstep.data.sources import Progress, no_progress

PIXEL_STRIDE = 4  # a sequence for the transformer is an image's pixels, of every fourth row and column


class TrialSize(NamedTuple):
    """How much a contender computes, so that a trial takes about a second."""

    batch_size: int
    num_steps: int  # of one trial
    num_warmup: int  # steps before the first trial


class BenchModel(NamedTuple):
    """A model that can be measured."""

    learning_rate: float
    on_cpu: TrialSize
    on_gpu: TrialSize
    is_module: bool = True  # else it is written for every framework, in fp32 only
    takes_tokens: bool = False
    optimizer: str = "sgd"
    random_shape: tuple[int, ...] = ()  # of a sample of random numbers; without one, samples are of the dataset
    num_classes: int = 0  # of random targets


LARGE: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-4}
TOKENS: dict[str, Any] = {"takes_tokens": True, "num_classes": 50257}
IMAGES: dict[str, Any] = {"random_shape": (3, 224, 224), "num_classes": 1000}
MODELS = {
    "lenet": BenchModel(0.2, TrialSize(256, 15, 3), TrialSize(256, 100, 20), is_module=False),
    "mlp": BenchModel(0.1, TrialSize(256, 30, 3), TrialSize(256, 100, 20)),
    "resnet18": BenchModel(0.1, TrialSize(64, 2, 1), TrialSize(256, 30, 10)),  # 256 take over 10 s on a CPU
    "transformer": BenchModel(0.1, TrialSize(256, 4, 1), TrialSize(256, 50, 10), takes_tokens=True),
    "gpt2": BenchModel(on_cpu=TrialSize(8, 1, 1), on_gpu=TrialSize(32, 10, 5), random_shape=(1024,), **TOKENS, **LARGE),
    "bert": BenchModel(on_cpu=TrialSize(8, 1, 1), on_gpu=TrialSize(64, 10, 5), random_shape=(512,), **TOKENS, **LARGE),
    "resnet50": BenchModel(0.1, TrialSize(16, 1, 1), TrialSize(256, 10, 5), **IMAGES),
    "vit-b-16": BenchModel(on_cpu=TrialSize(8, 1, 1), on_gpu=TrialSize(256, 10, 5), **IMAGES, **LARGE),
}
RANDOM_BATCHES = 16  # of random images
RANDOM_TOKEN_BATCHES = 64  # of tokens, which are smaller: at the end of an epoch, weights are copied to the host
SAME_FOR_ALL = (  # settings that `--set` cannot change, because they must be the same for all contenders
    "model", "data", "data_dir", "loss", "optimizer", "batch_size", "learning_rate", "momentum", "weight_decay",
    "precision", "num_epochs", "seed", "devices", "engine", "out",
)  # fmt: skip
OF_OUR_RUN = ("model", "data", "batch_size", "optimizer", "learning_rate", "precision", "num_shards", "seed")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, the data and the settings: plain values, to be passed to other processes as JSON."""

    model: str
    devices: tuple[str, ...]
    batch_size: int
    num_steps: int  # of one trial
    num_warmup: int
    learning_rate: float
    optimizer: str = "sgd"
    data: str = "fashion-mnist"
    data_dir: str | None = None
    precision: str = "fp32"
    num_shards: int = 8
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # more of RunConfig, for our own step

    @property
    def is_on_gpu(self) -> bool:
        """Whether the devices are GPUs; they are all of one kind."""
        return Device(self.devices[0]).kind == "cuda"

    def config(self) -> RunConfig:
        """The settings of our own run. It has no end, and writes nothing."""
        own = {name: getattr(self, name) for name in OF_OUR_RUN} | {"devices": ",".join(self.devices)}
        endless = {"num_epochs": 1_000_000, "checkpoint_every": 0, "timeout": 600.0}
        endless |= {"check_every": 0, "verify_every": 0}  # trials are short: they would cost some 0.1 %, and all of one
        return RunConfig(**(own | endless | self.settings))

    def to_dict(self) -> dict[str, Any]:
        """The workload as results describe it."""
        own = {name: getattr(self, name) for name in OF_OUR_RUN}
        return own | {"devices": list(self.devices), "more": self.settings, "steps_per_trial": self.num_steps}


def workload_for(
    model: str, devices: list[Device], precision: str = "fp32", **overrides: Any
) -> tuple[Workload, list[str]]:
    """The workload for a model on these devices, and notes about it. Overrides that are None do not count."""
    known = pick(MODELS, model, "model to measure")
    size = known.on_gpu if devices[0].kind == "cuda" else known.on_cpu
    overrides = {name: value for name, value in overrides.items() if value is not None}
    notes = []
    if "batch_size" not in overrides and size.batch_size < (usual := known.on_gpu.batch_size):
        notes = [f"batches of {size.batch_size} on CPUs, where one of {usual} takes too long"]
    if not known.is_module and precision != "fp32":
        notes, precision = [*notes, f"{model} is written for every framework, and has fp32 only"], "fp32"
    settings: dict[str, Any] = (
        {"learning_rate": known.learning_rate, "optimizer": known.optimizer} | size._asdict() | overrides
    )
    workload = Workload(model=model, devices=tuple(map(str, devices)), precision=precision, **settings)
    if workload.batch_size % len(devices):
        raise ConfigError(
            f"A batch of {workload.batch_size} samples cannot be cut into {len(devices)} equal parts, and the others "
            f"take a mean over parts. Use a multiple of {len(devices)} (--batch-size)."
        )
    if workload.num_steps < 1:
        raise ConfigError(f"A trial of {workload.num_steps} steps measures nothing. Use 1 or more (--steps).")
    workload.config()  # checks the settings
    return workload, notes


def load_samples(workload: Workload, progress: Progress = no_progress) -> Dataset:
    """The training samples of all contenders: full batches only, and no test samples."""
    known = MODELS[workload.model]
    if known.random_shape:
        number = RANDOM_TOKEN_BATCHES if known.takes_tokens else RANDOM_BATCHES
        return Dataset("random", *random_samples(known, number * workload.batch_size, workload.seed))
    data = load_dataset(workload.data, None if workload.data_dir is None else Path(workload.data_dir), progress)
    num_samples = data.num_train // workload.batch_size * workload.batch_size
    if not num_samples:
        raise ConfigError(
            f"A batch of {workload.batch_size} samples is larger than {workload.data}, which has {data.num_train} "
            f"for training. Use at most {data.num_train} (--batch-size)."
        )
    X, y = data.X_train[:num_samples], data.y_train[:num_samples]
    if known.takes_tokens:
        X, y = tokens_of(X)
    return Dataset(workload.data, X, y)


def random_samples(model: BenchModel, num_samples: int, seed: int) -> tuple[Array, Array]:
    """Samples for a model that is measured on random numbers."""
    draw = np.random.default_rng(seed)
    if model.takes_tokens:
        tokens = draw.integers(model.num_classes, size=(num_samples, model.random_shape[0] + 1))
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()
    images = draw.standard_normal((num_samples, *model.random_shape), dtype=np.float32)
    return images, draw.integers(model.num_classes, size=num_samples)


def tokens_of(images: Array) -> tuple[Array, Array]:
    """Images as sequences of tokens, and for each token the next one.

    >>> import numpy as np
    >>> X, y = tokens_of(np.zeros((5, 1, 28, 28), np.uint8))
    >>> X.shape, X.dtype == y.dtype == np.int64
    ((5, 48), True)
    """
    tokens = images[:, 0, ::PIXEL_STRIDE, ::PIXEL_STRIDE].reshape(len(images), -1).astype("int64")
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def parse_settings(entries: list[str]) -> dict[str, Any]:
    """Settings of RunConfig from `name=value`; a value that is not JSON is a string.

    >>> parse_settings(["exchange=tree", "num_shards=4", "heal=true"])
    {'exchange': 'tree', 'num_shards': 4, 'heal': True}
    """
    settings: dict[str, Any] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or name not in RunConfig.__dataclass_fields__:
            raise ConfigError(
                f"--set {entry}: not a setting of a run. Write name=value, with a name of lockstep.config.RunConfig: "
                f"--set exchange=tree."
            )
        if name in SAME_FOR_ALL:
            raise ConfigError(f"--set {entry}: {name} must be the same for all contenders. Leave it out.")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
