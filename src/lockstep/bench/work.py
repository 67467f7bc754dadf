"""What every contender does in a trial: the same steps on the same samples of the same data."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array
from lockstep.core.registry import pick
from lockstep.data import Dataset, load_dataset
from lockstep.data.sources import Progress, no_progress

EVERY = 4  # a sequence for the transformer is an image's pixels, of every fourth row and column


class Load(NamedTuple):
    """How much a contender does, so that a trial takes a second or a few."""

    batch_size: int
    num_steps: int  # of one trial
    num_warmup: int  # steps before the first trial
    note: str = ""


class Model(NamedTuple):
    """A model to be measured."""

    learning_rate: float
    on_cpu: Load
    on_gpu: Load
    is_module: bool = True  # else it is written for every framework, and knows float32 only
    takes_tokens: bool = False


MODELS = {
    "lenet": Model(0.2, Load(256, 15, 3), Load(256, 100, 20), is_module=False),
    "mlp": Model(0.1, Load(256, 30, 3), Load(256, 100, 20)),
    "resnet18": Model(
        0.1,
        Load(64, 2, 1, "batches of 64 on CPUs, where one of 256 takes more than ten seconds"),
        Load(256, 30, 10),
    ),
    "transformer": Model(0.1, Load(256, 4, 1), Load(256, 50, 10), takes_tokens=True),
}
SAME_FOR_ALL = (  # settings of a run that a contender cannot have for itself
    "model", "data", "data_dir", "loss", "optimizer", "batch_size", "learning_rate", "momentum", "weight_decay",
    "precision", "num_epochs", "seed", "devices", "engine", "out",
)  # fmt: skip
DEFAULT_MODELS = "lenet,resnet18,transformer"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The model, the data and the settings; plain values, so that it can be handed to another process."""

    model: str
    devices: tuple[str, ...]
    batch_size: int
    num_steps: int  # of one trial
    num_warmup: int
    learning_rate: float
    data: str = "fashion-mnist"
    data_dir: str | None = None
    precision: str = "fp32"
    num_shards: int = 8
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # more of RunConfig, for our own step

    @property
    def is_on_gpu(self) -> bool:
        """Whether the devices are GPUs: they are of one kind."""
        return Device(self.devices[0]).kind == "cuda"

    def config(self) -> RunConfig:
        """The settings of our own run. It never ends by itself, and writes nothing."""
        return RunConfig(
            **{
                "model": self.model,
                "data": self.data,
                "batch_size": self.batch_size,
                "learning_rate": self.learning_rate,
                "precision": self.precision,
                "num_shards": self.num_shards,
                "seed": self.seed,
                "devices": ",".join(self.devices),
                "num_epochs": 1_000_000,
                "check_every": 0,
                "checkpoint_every": 0,
                "timeout": 600.0,
                **self.settings,
            }
        )


def work_for(model: str, devices: list[Device], precision: str = "fp32", **given: Any) -> tuple[Work, list[str]]:
    """The work for a model on these devices, and what is to be known about it. What is given as None is left out."""
    known = pick(MODELS, model, "model to measure")
    load = known.on_gpu if devices[0].kind == "cuda" else known.on_cpu
    notes = [load.note] if load.note and given.get("batch_size") is None else []
    if not known.is_module and precision != "fp32":
        notes, precision = [*notes, f"{model} is written for every framework, and knows fp32 only"], "fp32"
    usual = {
        "batch_size": load.batch_size,
        "num_steps": load.num_steps,
        "num_warmup": load.num_warmup,
        "learning_rate": known.learning_rate,
    }
    chosen = usual | {name: value for name, value in given.items() if value is not None}
    work = Work(model=model, devices=tuple(map(str, devices)), precision=precision, **chosen)
    if work.batch_size % len(work.devices):
        raise ConfigError(
            f"A batch of {work.batch_size} samples cannot be cut into {len(work.devices)} equal parts, and the others "
            f"take a mean over parts. Use a multiple of {len(work.devices)} (--batch-size)."
        )
    if work.num_steps < 1:
        raise ConfigError(f"A trial of {work.num_steps} steps measures nothing. Use 1 or more (--steps).")
    work.config()  # which refuses what cannot be
    return work, notes


def samples_of(work: Work, progress: Progress = no_progress) -> Dataset:
    """The training samples of all contenders: whole batches only, and no test samples."""
    data = load_dataset(work.data, None if work.data_dir is None else Path(work.data_dir), progress)
    num_samples = data.num_train // work.batch_size * work.batch_size
    if not num_samples:
        raise ConfigError(
            f"A batch of {work.batch_size} samples is larger than {work.data}, which has {data.num_train} for "
            f"training. Use at most {data.num_train} (--batch-size)."
        )
    X, y = data.X_train[:num_samples], data.y_train[:num_samples]
    if MODELS[work.model].takes_tokens:
        X, y = tokens_of(X)
    return Dataset(work.data, X, y)


def tokens_of(images: Array) -> tuple[Array, Array]:
    """Images as sequences of tokens, and for each token the next one.

    >>> import numpy as np
    >>> X, y = tokens_of(np.zeros((5, 1, 28, 28), np.uint8))
    >>> X.shape, X.dtype == y.dtype == np.int64
    ((5, 48), True)
    """
    tokens = images[:, 0, ::EVERY, ::EVERY].reshape(len(images), -1).astype("int64")
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def parse_settings(given: list[str]) -> dict[str, Any]:
    """Settings of RunConfig from `name=value`, where the value is as JSON has it, or else a word.

    >>> parse_settings(["exchange=tree", "num_shards=4", "heal=true"])
    {'exchange': 'tree', 'num_shards': 4, 'heal': True}
    """
    settings: dict[str, Any] = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or name not in RunConfig.__dataclass_fields__:
            raise ConfigError(
                f"--set {entry}: not a setting of a run. Write name=value, with a name of lockstep.config.RunConfig: "
                f"--set exchange=tree."
            )
        if name in SAME_FOR_ALL:
            raise ConfigError(
                f"--set {entry}: this is the same for all contenders, or cannot be measured. Leave it out."
            )
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
