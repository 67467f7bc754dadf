"""The settings of a run: one frozen record, checked in one place. Deeper code trusts it."""

import math
import operator
from dataclasses import dataclass
from pathlib import Path

from lockstep.backends import DEFAULT_BACKEND
from lockstep.core.errors import ConfigError
from lockstep.core.entry_points import is_place
from lockstep.optim.lr_schedule import SCHEDULES
from lockstep.core.registry import pick
from lockstep.partition.balance import BALANCES
from lockstep.partition.buckets import BUCKET_MB

MAX_SHARDS = 4096  # a shard is a forward and backward pass of its own: more would only be slow
MAX_SEED = 2**32 - 1
MAX_WORKERS = 256
LEARNING_RATES = {"sgd": 0.2, "adam": 0.001, "adamw": 0.001}  # where none is given: the text's, and Adam's own
MAX_TIMEOUT = 7 * 24 * 3600.0
OPTIONAL = ("learning_rate", "clip_norm")
ON_HANG = {
    "stop": "the run ends, and says who did not arrive",
    "drop": "the run goes on without those who did not arrive",
}
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

    The weights depend on the first group alone. The second decides where and how fast they are computed.

    >>> RunConfig(batch_size=0)
    Traceback (most recent call last):
    lockstep.core.errors.ConfigError: A batch of 0 samples cannot be trained on. Use 1 or more (--batch-size).
    """

    model: str = "lenet"  # a name, or package.file:function
    data: str = "fashion-mnist"  # a name, the path of a .npz file, or package.file:function
    loss: str = "cross_entropy"  # a name, or package.file:function
    optimizer: str = "sgd"  # a name, or package.file:function
    batch_size: int = 256  # samples of one update, over all devices together
    learning_rate: float | None = None  # for batch_size; never scaled behind the user's back. Nothing: the optimizer's
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"  # how the learning rate goes on after the warm-up
    warmup: int = 0  # steps in which it grows to its full value
    clip_norm: float | None = None  # gradients with a larger norm are made shorter
    batch_norm: str = "shard"  # whose statistics: a shard's, or the whole batch's (sync)
    precision: str = "fp32"
    compile: bool = False  # the model is made into code of its own, whose bits are its own too
    num_epochs: int = 10
    num_shards: int = 8  # parts of a batch: part of the run, as the number of devices is not
    seed: int = 0
    backend: str = DEFAULT_BACKEND

    devices: int | str | None = None  # a number, or a list like cpu:0,cpu:1; nothing: all that there is
    engine: str = "inprocess"
    exchange: str = "sharded"
    bucket_mb: float = BUCKET_MB  # gradients leave in parts of this size while others are computed; 0: all at the end
    balance: str = "equal"  # how many shards each device gets
    capture: bool = True  # steps on one GPU are recorded and replayed
    trace: bool = False  # what every device does is written down; steps are then not recorded
    workers: int | None = None  # processes that load samples which are not in memory; nothing: one a core, four at most
    data_dir: Path | None = None  # where the files of a named data set lie
    out: Path | None = None  # the folder to record the run in
    checkpoint_every: int | None = None  # steps; nothing: after each epoch; 0: never
    keep_checkpoints: int = 3  # the last so many
    check_every: int = 100  # steps, after which the replicas are compared; 0: never
    heal: bool = False  # when replicas differ, go back to where they were equal
    timeout: float = 60.0  # seconds that ranks wait for one of them in an exchange
    on_hang: str = "stop"  # what then: stop the run, or drop the rank and go on
    max_restarts: int = 3  # workers that are started anew when one dies (engine processes)

    def __post_init__(self) -> None:
        for name in (
            "model",
            "loss",
            "optimizer",
            "schedule",
            "batch_norm",
            "precision",
            "backend",
            "engine",
            "exchange",
            "balance",
            "on_hang",
        ):
            if not isinstance(getattr(self, name), str):
                hint = " A function of the optimizer goes to scheduler=." if name == "schedule" else ""
                raise ConfigError(f"{name} is {getattr(self, name)!r}. It must be a name.{hint}")
        for name in (
            "batch_size",
            "num_epochs",
            "num_shards",
            "seed",
            "warmup",
            "workers",
            "checkpoint_every",
            "keep_checkpoints",
            "check_every",
            "max_restarts",
        ):
            try:
                if not (name in ("workers", "checkpoint_every") and getattr(self, name) is None):
                    object.__setattr__(self, name, operator.index(getattr(self, name)))  # numpy's whole numbers too
            except TypeError:
                raise ConfigError(f"{name} is {getattr(self, name)!r}. It must be a whole number.") from None
        if self.learning_rate is None and self.optimizer in LEARNING_RATES:
            object.__setattr__(self, "learning_rate", LEARNING_RATES[self.optimizer])
        for name in ("learning_rate", "momentum", "weight_decay", "clip_norm", "timeout", "bucket_mb"):
            value, words = getattr(self, name), name.replace("_", " ")
            try:
                object.__setattr__(self, name, None if value is None and name in OPTIONAL else float(value))
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"The {words} is {value!r}. It must be a number.") from None
        object.__setattr__(self, "data", str(self.data))
        if "\0" in self.data:
            raise ConfigError(f"data is {self.data!r}. It must be a name, or the path of a .npz file.")
        if self.data.endswith(".npz"):  # a run's record must mean the same file from any folder
            object.__setattr__(self, "data", str(Path(self.data).resolve()))
        if self.data_dir is not None:
            object.__setattr__(self, "data_dir", Path(self.data_dir).resolve())
        if self.batch_size < 1:
            raise ConfigError(
                f"A batch of {self.batch_size} samples cannot be trained on. Use 1 or more (--batch-size)."
            )
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ConfigError(
                f"The learning rate {self.learning_rate} does not train. Use a positive number, like 0.2 (--lr)."
            )
        if self.num_epochs < 1:
            raise ConfigError(f"{self.num_epochs} epochs leave nothing to do. Use 1 or more (--epochs).")
        if not 1 <= self.num_shards <= MAX_SHARDS:
            raise ConfigError(f"A batch cannot be cut into {self.num_shards} shards. Use 1 to {MAX_SHARDS} (--shards).")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"The seed {self.seed} is out of range. Use 0 to {MAX_SEED} (--seed).")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"A momentum of {self.momentum:g} does not settle. Use 0 to less than 1 (--momentum).")
        if is_place(self.optimizer) and (self.learning_rate is not None or self.weight_decay):
            raise ConfigError(
                f"The optimizer is made by {self.optimizer}: give it the learning rate and the weight decay there, and "
                f"leave --lr and --weight-decay out."
            )
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"Momentum belongs to sgd, and the optimizer is {self.optimizer}. Leave --momentum out.")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"A weight decay of {self.weight_decay:g} is none. Use 0 or more (--weight-decay).")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ConfigError(
                f"Gradients cannot be clipped to a norm of {self.clip_norm:g}. Use more than 0 (--clip-norm)."
            )
        if self.warmup < 0:
            raise ConfigError(f"A warm-up of {self.warmup} steps cannot be. Use 0 or more (--warmup).")
        if self.workers is not None and not 0 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"{self.workers} workers cannot load samples. Use 0 to {MAX_WORKERS} (--workers).")
        for name, least in (("checkpoint_every", 0), ("keep_checkpoints", 1), ("check_every", 0), ("max_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}. Use {least} or more.")
        if not 0 <= self.bucket_mb < math.inf:
            raise ConfigError(
                f"Gradients cannot leave in parts of {self.bucket_mb:g} MB. Use more than 0, or 0 to let them leave "
                f"together when backward is over (--bucket-mb)."
            )
        if not 0 < self.timeout < MAX_TIMEOUT:
            raise ConfigError(
                f"A timeout of {self.timeout:g} seconds cannot be waited for. Use more than 0 and less than a week "
                f"(--timeout)."
            )
        pick(BALANCES, self.balance, "balance")
        pick(ON_HANG, self.on_hang, "answer to a hang")
        pick(SCHEDULES, self.schedule, "schedule")
        pick(BATCH_NORMS, self.batch_norm, "kind of batch norm")
        pick(PRECISIONS, self.precision, "precision")


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
