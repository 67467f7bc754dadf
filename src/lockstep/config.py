"""The settings of a run: one frozen record, checked in one place. Deeper code trusts it.

A setting is written once, here: type, default, help, check and scope. The command line (`cli/options.py`), the API
(`training/train.py`), checkpoints and torchrun read it from this record.
"""

from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from lockstep.backends import BACKENDS, DEFAULT_BACKEND
from lockstep.core import names
from lockstep.core.entry_points import is_entry_point
from lockstep.core.errors import ConfigError
from lockstep.core.files import can_be_path
from lockstep.core.settings import (
    AGREED,
    FAILURES,
    IDENTITY,
    LOCAL,
    MAIN,
    OPTIMIZATION,
    RECORDS,
    checked,
    option_of,
    setting,
)
from lockstep.optim.lr_schedule import SCHEDULES
from lockstep.partition.balance import BALANCES
from lockstep.partition.grid import AUTO, parse_split
from lockstep.schedules.exchanges import EXCHANGES, NATIVE
from lockstep.schedules.pipeline_orders import ORDERS

MAX_SHARDS = 4096  # a shard is a forward and backward pass of its own: more would only be slow
MAX_SEED = 2**32 - 1
LEARNING_RATES = {"sgd": 0.2, "adam": 0.001, "adamw": 0.001}  # the defaults: the text's, and Adam's own
OWN = "or package.module:function of your own,"
ENGINES = {
    "auto": "processes for several GPUs, else inprocess",
    "inprocess": "a thread for each device",
    "processes": "a process for each (torchrun: several machines)",
}
UPDATES = {"replicated": "every device updates everything", "sharded": "each updates a part (as ZeRO stage 1)"}
DEFAULT_SLICES = 8  # of --split layers
ON_HANG = {"stop": "end the run and name the straggler", "drop": "continue without it (engine processes)"}
LOSSES_OVER = {
    "sample": "it returns one number for each sample, or a pair (sum, weight) of some samples",
    "batch": "it looks across the samples of the whole batch (contrastive losses), and returns one number",
}
BATCH_NORMS = {"shard": "of each shard, running ones updated shard by shard", "sync": "of the whole batch"}
PRECISIONS = {
    "fp32": "float32 throughout",
    "tf32": "float32 parameters, matmuls and convolutions in TF32 (NVIDIA GPUs)",
    "bf16": "float32 parameters, bfloat16 where it is safe (autocast)",
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
        "A number of devices, or a list: cpu:0,cpu:1 or cuda:0,cuda:0. A number means GPUs (some used more than once "
        "if there are fewer), or logical CPU devices if there is no GPU. Default: all GPUs, else one logical CPU "
        "device per core; at most --shards.",
        group=MAIN,
    )
    batch_size: int = setting(
        256, "Samples of one update, over all devices together.", IDENTITY, limits={">=": 1}, group=MAIN
    )
    learning_rate: float | None = setting(
        None,
        "Learning rate, never scaled. Default: 0.2; adam, adamw: 0.001.",
        IDENTITY,
        limits={">": 0},
        option="lr",
        group=MAIN,
    )
    num_epochs: int = setting(10, "Passes over the data.", AGREED, limits={">=": 1}, option="epochs", group=MAIN)
    model: str = setting(
        "lenet",
        f"{', '.join(names.MODELS)} (lenet: in any framework), {OWN} which returns a module.",
        IDENTITY,
        group=MAIN,
    )
    data: str = setting(
        "fashion-mnist",
        f"{', '.join(names.DATASETS)}, a .npz file, {OWN} which returns (X, y), ((X, y), (X_test, "
        "y_test)), a map-style dataset or a pair of them.",
        IDENTITY,
        group=MAIN,
    )
    data_dir: Path | None = setting(  # noqa: RUF009
        None, "Folder with the files of Fashion-MNIST. Default: a cache, or a download.", group=MAIN
    )
    loss: str = setting(
        "cross_entropy",
        f"{', '.join(names.LOSSES)} (the model's own), {OWN} which takes (output, y) and returns a loss per sample.",
        IDENTITY,
        group=OPTIMIZATION,
    )
    loss_over: str = setting(
        "sample", "What the loss is a function of.", IDENTITY, choices=LOSSES_OVER, option="over", group=OPTIMIZATION
    )
    optimizer: str = setting(
        "sgd",
        f"{', '.join(names.OPTIMIZERS)}, {OWN} which takes the parameters and returns an optimizer.",
        IDENTITY,
        group=OPTIMIZATION,
    )
    momentum: float = setting(0.0, "Momentum of sgd.", IDENTITY, limits={">=": 0, "<": 1}, group=OPTIMIZATION)
    weight_decay: float | None = setting(
        None, "Weight decay. Default: 0.01 for adamw, 0 for the others.", IDENTITY, limits={">=": 0}, group=OPTIMIZATION
    )
    schedule: str = setting(
        "constant", "Learning-rate schedule after the warm-up.", IDENTITY, choices=SCHEDULES, group=OPTIMIZATION
    )
    warmup: int = setting(
        0, "Steps in which the learning rate grows to its full value.", IDENTITY, limits={">=": 0}, group=OPTIMIZATION
    )
    clip_norm: float | None = setting(
        None, "Clip gradients to this norm. Default: off.", IDENTITY, limits={">": 0}, group=OPTIMIZATION
    )
    ema: float | None = setting(
        None,
        "Decay of a moving average of the weights, like 0.999, which is saved beside them. Default: off.",
        IDENTITY,
        limits={">=": 0, "<": 1},
        group=OPTIMIZATION,
    )
    batch_norm: str = setting("shard", "Statistics of batch norm.", IDENTITY, choices=BATCH_NORMS, group=OPTIMIZATION)
    precision: str = setting(
        "fp32", "Precision of a model that is a module.", IDENTITY, choices=PRECISIONS, group=OPTIMIZATION
    )
    num_shards: int = setting(
        8,
        "Shards (micro-batches) of a batch. Changing it changes the weights; changing --devices does not.",
        IDENTITY,
        limits={">=": 1, "<=": MAX_SHARDS},
        option="shards",
        group=OPTIMIZATION,
    )
    seed: int = setting(
        0, "Seed of weights, sample order and dropout.", IDENTITY, limits={">=": 0, "<=": MAX_SEED}, group=OPTIMIZATION
    )
    backend: str = setting(
        DEFAULT_BACKEND, "The framework (see `lockstep devices`).", IDENTITY, choices=dict.fromkeys(BACKENDS)
    )
    engine: str = setting("auto", "How ranks run.", choices=ENGINES)
    exchange: str = setting(
        "sharded",
        "The all-reduce. With ring and native (the framework's own, of processes) weights depend on --devices.",
        AGREED,
        choices={**EXCHANGES, NATIVE: None},
    )
    split: str = setting(
        "data",
        "What devices divide: data (the batch), network (into pipeline stages), layers (each of them); combinations, "
        "like data=2,network=2; or auto: data, or the fewest stages that fit into memory.",
        AGREED,
    )
    stages: str | None = setting(
        None,
        "The first layer of each stage of --split network except the first stage: a,b. Default: stages of equal cost.",
        AGREED,
    )
    pipeline: str = setting("1f1b", "Order of the shards in the stages of a network.", AGREED, choices=ORDERS)
    num_slices: int | None = setting(
        None,
        "Slices that a layer is computed in. Changing it changes the weights. Default: 8 with --split layers.",
        IDENTITY,
        limits={">=": 1, "<=": 1024},
        option="slices",
    )
    update: str = setting("replicated", "Who updates the parameters.", AGREED, choices=UPDATES)
    bucket_mb: float | None = setting(
        None,
        "Megabytes of a bucket, exchanged during the backward pass; 0: no overlap. Default: 8 between processes and "
        "between GPUs (not in captured steps), 0 between CPU devices of one process, whose cores are busy.",
        AGREED,
        limits={">=": 0},
    )
    balance: str = setting("equal", "How shards are assigned to devices.", AGREED, choices=BALANCES)
    compile: bool = setting(
        False, "Compile the model (torch.compile): faster steps; the weights differ from those without.", IDENTITY
    )
    portable: bool = setting(
        False,
        "Use kernels that all x86-64 processors of the last ten years have (AVX2): other processors give the same "
        "weights, too. Slower where there is AVX-512; the weights differ from those without.",
        IDENTITY,
    )
    capture: bool = setting(True, "Capture steps on GPUs as CUDA graphs.")
    trace: bool = setting(False, "Say where the time went, and write trace.json, for Perfetto.", AGREED, group=RECORDS)
    log_every: int | None = setting(
        None,
        "Steps between two lines in metrics.jsonl, and of a logger; 0: only epochs. Default: some hundred lines a run.",
        limits={">=": 0},
        group=RECORDS,
    )
    logger: str | None = setting(
        None,
        "tensorboard: curves in the run's folder, for TensorBoard (needs tensorboardX); "
        f"{OWN} which returns an object with Lightning's logger methods. Default: none.",
        group=RECORDS,
    )
    workers: int | None = setting(
        None, "Processes that load a map-style dataset. Default: one a core, at most 4.", limits={">=": 0, "<=": 256}
    )
    out: Path | None = setting(None, "Folder of the run. Default: a new one below runs/; in Python, none.", group=MAIN)  # noqa: RUF009
    checkpoint_every: int | None = setting(
        None,
        "Steps between checkpoints, besides those after each epoch; 0: none at all. Default: only those.",
        AGREED,
        limits={">=": 0},
        group=RECORDS,
    )
    keep_checkpoints: int = setting(3, "Checkpoints to keep: the newest ones.", limits={">=": 1}, group=RECORDS)
    check_every: int = setting(
        100, "Steps between comparisons of the replicas; 0: never.", AGREED, limits={">=": 0}, group=FAILURES
    )
    verify_every: int = setting(
        400,
        "Steps between verifications: every shard is computed once more, by another device if there is one, and "
        "compared. 0: never.",
        AGREED,
        limits={">=": 0},
        group=FAILURES,
    )
    heal: bool = setting(
        False, "When replicas differ, go back to where they were equal, instead of stopping.", AGREED, group=FAILURES
    )
    timeout: float = setting(
        60.0, "Seconds that ranks wait for a straggler.", limits={">": 0, "<": 7 * 24 * 3600}, group=FAILURES
    )
    on_hang: str = setting("stop", "What to do after the timeout.", choices=ON_HANG, group=FAILURES)
    max_restarts: int = setting(
        3, "Restarts of rank processes that die; then the others continue.", limits={">=": 0}, group=FAILURES
    )

    def __post_init__(self) -> None:
        if callable(self.schedule):
            raise ConfigError(f"schedule must be a name, got {self.schedule!r}. For a function, use scheduler=.")
        object.__setattr__(self, "data", str(self.data))
        for each in fields(self):
            object.__setattr__(self, each.name, checked(each, TYPES[each.name], getattr(self, each.name)))
        if self.learning_rate is None and self.optimizer in LEARNING_RATES:
            object.__setattr__(self, "learning_rate", LEARNING_RATES[self.optimizer])
        if not can_be_path(self.data):
            raise ConfigError(f"data must be a name or the path of a .npz file, got {self.data!r} (--data).")
        if self.data.endswith(".npz"):  # a run's record must mean the same file from any folder
            object.__setattr__(self, "data", str(Path(self.data).resolve()))
        if self.data_dir is not None:
            object.__setattr__(self, "data_dir", self.data_dir.resolve())
        if is_entry_point(self.optimizer) and (self.learning_rate is not None or self.weight_decay):
            raise ConfigError(
                f"The optimizer is made by {self.optimizer}: set the learning rate and the weight decay there, and "
                f"leave --lr and --weight-decay out."
            )
        if self.num_slices is None and self.split != AUTO and "layers" in parse_split(self.split):
            object.__setattr__(self, "num_slices", DEFAULT_SLICES)
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
            f"Use at most {num_shards} devices, or {num_ranks} shards (--shards; this changes the weights)."
        )


def check_batch(batch_size: int, num_samples: int, data: str) -> None:
    """Refuses a batch that is larger than the data: every epoch would be one update on all of it."""
    if batch_size > num_samples:
        raise ConfigError(
            f"A batch of {batch_size} samples is larger than {data}, which has {num_samples} for training. "
            f"Use at most {num_samples} (--batch-size)."
        )
