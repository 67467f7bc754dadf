"""Metrics on all devices, each test sample counted exactly once: the text's fourth exercise.

The samples are cut into batches of a fixed size, whatever the number of devices, so the same kernels compute a sample
on any of them. The sums of these batches are added with one rounding at the end, so their order does not matter.
"""

import math
from collections.abc import Iterable
from functools import partial

import numpy as np

from lockstep.core.device import Device
from lockstep.data.batch import Batch, BatchSource
from lockstep.partition.batch import split_into_shards
from lockstep.partition.ranks import split_over_ranks
from lockstep.replicas.replica import Replica
from lockstep.training.replica_set import ReplicaSet


def evaluate(replicas: ReplicaSet, source: BatchSource, eval_batch_size: int, batch_size: int) -> dict[str, float]:
    """The mean of every metric over all samples of `source`."""
    size = source.num_samples if source.in_memory else batch_size
    split = partial(split_into_eval_batches, eval_batch_size=eval_batch_size)
    batches = source.batches(np.arange(source.num_samples), size, split, epoch=0)
    return evaluate_batches(replicas, batches, eval_batch_size)


def evaluate_batches(replicas: ReplicaSet, batches: Iterable[Batch], eval_batch_size: int) -> dict[str, float]:
    """The mean of every metric over the samples of all batches, `eval_batch_size` of them computed at a time."""
    engine, able = replicas.engine, replicas.placement.ranks_with_all
    sums: dict[str, list[list[float]]] = {}
    for batch in batches:
        eval_batches = split_into_eval_batches(batch.num_samples, eval_batch_size)
        shares = dict(zip(able, split_over_ranks(len(eval_batches), len(able)), strict=True))

        def work(rank: int, device: Device, replica: Replica) -> list[dict[str, list[float]]]:
            own = [eval_batches[number] for number in shares.get(rank, ())]  # noqa: B023 - called in this iteration only
            return [replica.measure(*batch.fetch(rank, part.start, part.stop)) for part in own]  # noqa: B023

        measured = engine.all_gather(engine.each("evaluation", work, replicas.local))
        for name, value in (item for of_rank in measured for metrics in of_rank for item in metrics.items()):
            sums.setdefault(name, []).append(value)
    return {name: _quotient(*map(math.fsum, zip(*pairs, strict=True))) for name, pairs in sums.items()}


def _quotient(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def split_into_eval_batches(num_samples: int, eval_batch_size: int) -> list[range]:
    """Parts of at most `eval_batch_size` samples, whose sizes differ by at most one."""
    return split_into_shards(num_samples, -(-num_samples // eval_batch_size))
