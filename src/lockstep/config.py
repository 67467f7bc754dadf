"""The settings of a run: one frozen record, checked in one place. Deeper code trusts it.

A setting is written once, here: type, default, help, check and scope. The command line (`cli/options.py`), the API
(`training/train.py`), checkpoints and torchrun read it from this record.
"""

from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from lockstep.backends import BACKENDS, DEFAULT_BACKEND
from lockstep.core.entry_points import is_entry_point
from lockstep.core.errors import ConfigError
from lockstep.core.settings import (
    AGREED,
    IDENTITY,
    LOCAL,
    above,
    at_least,
    between,
    checked,
    from_to_below,
    option_of,
    setting,
)
from lockstep.optim.lr_schedule import SCHEDULES
from lockstep.partition.balance import BALANCES
from lockstep.partition.buckets import BUCKET_MB
from lockstep.schedules.exchanges import EXCHANGES, NATIVE

MAX_SHARDS = 4096  # a shard is a forward and backward pass of its own: more would only be slow
MAX_SEED = 2**32 - 1
MAX_WORKERS = 256
MAX_TIMEOUT = 7 * 24 * 3600.0
LEARNING_RATES = {"sgd": 0.2, "adam": 0.001, "adamw": 0.001}  # where none is given: the text's, and Adam's own
ENTRY_POINT = "or an entry point of your own, package.file:function,"
ENGINES = {
    "inprocess": "one process, a thread for each device",
    "processes": "a process for each device, on this machine or, under torchrun, on several",
}
ON_HANG = {"stop": "end the run, and name the stragglers", "drop": "continue without the stragglers"}
BATCH_NORMS = {
    "shard": "statistics of the shard; running statistics as if the shards came one after the other",
    "sync": "statistics of the whole batch",
}
PRECISIONS = {
    "fp32": "float32 throughout",
    "tf32": "float32 parameters, products rounded to TensorFloat-32 (NVIDIA GPUs)",
    "bf16": "bfloat16 where it is safe (autocast), float32 parameters",
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run depends on; two equal records give two equal runs.

    >>> RunConfig(batch_size=0)
    Traceback (most recent call last):
    lockstep.core.errors.ConfigError: batch size must be at least 1, got 0 (--batch-size).
    """

    devices: int | str | None = setting(
        None,
        "A number (GPUs if there are that many, else logical CPU devices), or a list: cpu:0,cpu:1 or cuda:0,cuda:0. "
        "Default: all GPUs, else a logical device for each core.",
    )
    batch_size: int = setting(256, "Samples of one update, over all devices together.", IDENTITY, limits=at_least(1))
    learning_rate: float | None = setting(
        None,
        "Learning rate, for the whole batch; never scaled. Default: 0.2 for sgd, 0.001 for adam and adamw.",
        IDENTITY,
        limits=above(0),
        option="lr",
    )
    num_epochs: int = setting(10, "Passes over the data.", AGREED, limits=at_least(1), option="epochs")
    model: str = setting(
        "lenet",
        f"The model: lenet (in every framework), lenet-bn, mlp, resnet18, transformer, {ENTRY_POINT} that makes a "
        "module.",
        IDENTITY,
    )
    data: str = setting(
        "fashion-mnist",
        f"The data set: fashion-mnist, fashion-mnist-mini, a .npz file, {ENTRY_POINT} that gives (X, y), ((X, y), "
        "(X_test, y_test)), a map-style data set or a pair of them.",
        IDENTITY,
    )
    data_dir: Path | None = setting(None, "Folder with the data set's files, packed or not.")
    loss: str = setting(
        "cross_entropy",
        f"The loss: cross_entropy, mse, l1, bce, {ENTRY_POINT} of (output, y) with one number for each sample.",
        IDENTITY,
    )
    optimizer: str = setting(
        "sgd", f"The optimizer: sgd, adam, adamw, {ENTRY_POINT} that makes one of a list of parameters.", IDENTITY
    )
    momentum: float = setting(0.0, "Momentum of sgd.", IDENTITY, limits=from_to_below(0, 1))
    weight_decay: float = setting(0.0, "Weight decay.", IDENTITY, limits=at_least(0))
    schedule: str = setting("constant", "Learning-rate schedule after the warm-up.", IDENTITY, choices=SCHEDULES)
    warmup: int = setting(0, "Steps in which the learning rate grows to its full value.", IDENTITY, limits=at_least(0))
    clip_norm: float | None = setting(None, "Clip gradients to this norm.", IDENTITY, limits=above(0))
    batch_norm: str = setting("shard", "Batch norm over a shard, or the whole batch.", IDENTITY, choices=BATCH_NORMS)
    precision: str = setting("fp32", "Arithmetic of a model that is a module.", IDENTITY, choices=PRECISIONS)
    num_shards: int = setting(
        8,
        "Shards that every batch is cut into. Changing it changes the bits; changing --devices does not.",
        IDENTITY,
        limits=between(1, MAX_SHARDS),
        option="shards",
    )
    seed: int = setting(0, "Seed of initial weights, sample order and dropout.", IDENTITY, limits=between(0, MAX_SEED))
    backend: str = setting(
        DEFAULT_BACKEND, "The framework. `lockstep devices` says which are here.", IDENTITY, choices=BACKENDS
    )
    engine: str = setting(
        "inprocess",
        "Who runs the devices: a thread for each, or a process for each (torchrun starts them on several machines).",
        choices=ENGINES,
    )
    exchange: str = setting(
        "sharded",
        "The all-reduce. ring, and native (the framework's own, between processes), add in an order of their own and do "
        "not keep the bits.",
        AGREED,
        choices={**EXCHANGES, NATIVE: None},
    )
    bucket_mb: float = setting(
        BUCKET_MB,
        "Exchange gradients in buckets of this many megabytes, overlapping with the backward pass; 0: all at the end.",
        AGREED,
        limits=at_least(0),
    )
    balance: str = setting("equal", "Shards for each device: equal, or by measured speed.", AGREED, choices=BALANCES)
    compile: bool = setting(False, "Compile the model (torch.compile): faster steps, other bits.", IDENTITY)
    capture: bool = setting(True, "Capture steps on one GPU as a CUDA graph.")
    trace: bool = setting(
        False, "Write what every device does, and when, to trace.json, for Chrome or Perfetto.", AGREED
    )
    workers: int | None = setting(
        None,
        "Processes that load samples of a map-style data set. Default: one a core, four at most.",
        limits=between(0, MAX_WORKERS),
    )
    out: Path | None = setting(None, "Folder of the run. Default: runs/ and a name.")
    checkpoint_every: int | None = setting(
        None, "Steps between checkpoints. Default: one after each epoch; 0: none.", AGREED, limits=at_least(0)
    )
    keep_checkpoints: int = setting(3, "Keep the last so many checkpoints.", limits=at_least(1))
    check_every: int = setting(100, "Steps between comparisons of the replicas; 0: never.", AGREED, limits=at_least(0))
    heal: bool = setting(False, "When replicas differ, go back to where they were equal, instead of stopping.", AGREED)
    timeout: float = setting(
        60.0, "Seconds that ranks wait for a straggler in an exchange.", limits=above(0, MAX_TIMEOUT)
    )
    on_hang: str = setting("stop", "After that: stop, or drop the straggler (engine processes).", choices=ON_HANG)
    max_restarts: int = setting(
        3, "Workers that are restarted when one dies; after that, the others continue without it.", limits=at_least(0)
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", str(self.data))
        for each in fields(self):
            object.__setattr__(self, each.name, checked(each, TYPES[each.name], getattr(self, each.name)))
        if self.learning_rate is None and self.optimizer in LEARNING_RATES:
            object.__setattr__(self, "learning_rate", LEARNING_RATES[self.optimizer])
        if "\0" in self.data:
            raise ConfigError(f"data must be a name or the path of a .npz file, got {self.data!r} (--data).")
        if self.data.endswith(".npz"):  # a run's record must mean the same file from any folder
            object.__setattr__(self, "data", str(Path(self.data).resolve()))
        if self.data_dir is not None:
            object.__setattr__(self, "data_dir", self.data_dir.resolve())
        if is_entry_point(self.optimizer) and (self.learning_rate is not None or self.weight_decay):
            raise ConfigError(
                f"The optimizer is made by {self.optimizer}: give it the learning rate and the weight decay there, and "
                f"leave --lr and --weight-decay out."
            )
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"Momentum belongs to sgd, and the optimizer is {self.optimizer}. Leave --momentum out.")


TYPES: dict[str, Any] = get_type_hints(RunConfig)


def settings_in(*scopes: str) -> "list[Field[Any]]":
    """The settings of these scopes: `IDENTITY`, `AGREED`, `LOCAL`; of all, where none is named."""
    return [each for each in fields(RunConfig) if each.metadata["scope"] in (scopes or (IDENTITY, AGREED, LOCAL))]


def field_of(option: str) -> "Field[Any]":
    """The setting with this name, or with this name for the user."""
    return next(each for each in fields(RunConfig) if option in (each.name, option_of(each)))


def check_ranks(num_ranks: int, num_shards: int) -> None:
    """Refuses more devices than shards: the last ones would never have work."""
    if num_ranks > num_shards:
        raise ConfigError(
            f"{num_ranks} devices cannot share {num_shards} shard{'s' * (num_shards > 1)}: some would never have work. "
            f"Use at most {num_shards} devices, or {num_ranks} shards (--shards; another run, with other bits)."
        )


def check_batch(batch_size: int, num_samples: int, data: str) -> None:
    """Refuses a batch that is larger than the data: every epoch would be one update on all of it."""
    if batch_size > num_samples:
        raise ConfigError(
            f"A batch of {batch_size} samples is larger than {data}, which has {num_samples} for training. "
            f"Use at most {num_samples} (--batch-size)."
        )
