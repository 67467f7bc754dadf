"""One training step, for every engine, framework and number of devices. Start here, and with `parallel/data.py`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from lockstep.backends import LossFuture
from lockstep.data.batch import Batch
from lockstep.parallel.combined import ModelSplit, combined
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.balance import Balance
from lockstep.partition.batch import split_into_shards
from lockstep.partition.buckets import BUCKET_MB, bucket_ranges
from lockstep.replicas.replica import Replica
from lockstep.runtime.engine import Engine, StepInput


class StepOptions(NamedTuple):
    """How the work of a step is split."""

    num_shards: int = 8
    exchange: str = "sharded"
    bucket_mb: float = BUCKET_MB
    shards_together: bool = False  # a rank's shards go through the model together (batch norm over the whole batch)
    max_addends: int = 2  # of one addition
    model_split: ModelSplit | None = None  # where not only the data is split


def train_step(
    engine: Engine, replicas: Sequence[Replica], options: StepOptions, balance: Balance, step: int, batch: Batch
) -> LossFuture:
    """Updates every replica on the whole of `batch`, with the same bits for any number of ranks.

    Returns the summed loss of each shard, in shard order.
    """
    shards, split = split_into_shards(batch.num_samples, options.num_shards), options.model_split
    ranges = balance.ranges(len(shards), engine.num_ranks if split is None else split.grid.data)
    if split is None:
        entries = replicas[0].entries
        buckets = bucket_ranges(entries, options.bucket_mb, engine.num_ranks)
        together, max_addends = options.shards_together, options.max_addends
        schedule = data_parallel(DataParallel(ranges, entries, buckets, options.exchange, together, max_addends))
    else:
        schedule = combined(split.step(ranges, options.exchange, options.shards_together))
    result = engine.run(schedule, replicas, StepInput(step, batch, shards))
    if split is None:
        balance.record_times(ranges, result.seconds)
    return Resolved(result.losses, result.weights)


class Resolved(NamedTuple):
    """Losses that need not be waited for."""

    losses: list[float]
    weights: list[float] | None

    def result(self) -> list[float]:
        """The losses."""
        return self.losses


class Steps(Protocol):
    """Does one step after the other."""

    max_in_flight: int  # steps that may be under way before somebody has to wait for the first of them

    @property
    def why_eager(self) -> str:
        """Why steps are not captured as CUDA graphs, where they were to be."""

    @property
    def capture_seconds(self) -> float:
        """Seconds that were spent on capture so far."""

    def run(self, step: int, batch: Batch, /) -> LossFuture:
        """Does step number `step`, or starts it."""
        ...


class EagerSteps:
    """Steps that are executed one by one."""

    max_in_flight = 0

    def __init__(self, engine: Engine, replicas: Sequence[Replica], options: StepOptions, balance: Balance) -> None:
        self.run: Callable[[int, Batch], LossFuture] = partial(train_step, engine, replicas, options, balance)
        self.why_eager, self.capture_seconds = "", 0.0
