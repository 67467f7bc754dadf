"""Metrics on all devices, each test sample counted exactly once: the text's fourth exercise.

The samples are cut into batches of a fixed size, whatever the number of devices, so the same kernels compute a sample
on any of them. The sums of these batches are added with one rounding at the end, so their order does not matter.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lockstep.core.device import Device
from lockstep.data.batch import Batch, BatchSource
from lockstep.partition.batch import split_into_shards
from lockstep.partition.ranks import split_over_ranks
from lockstep.replicas.replica import Replica
from lockstep.training.replica_set import ReplicaSet

WholeSet = Callable[[list[Any]], dict[str, float]]  # (output, targets) of some samples each -> metrics of all


class EvalSpec(NamedTuple):
    """How samples are evaluated."""

    batch_size: int  # samples that are computed together, on any devices
    whole_set: WholeSet | None = None  # metrics that are no means


def evaluate(
    replicas: ReplicaSet, source: BatchSource, how: EvalSpec, batch_size: int, is_alone: bool = False
) -> dict[str, float]:
    """Every metric of all samples of `source`."""
    size = source.num_samples if source.in_memory else batch_size
    split = partial(split_into_eval_batches, eval_batch_size=how.batch_size)
    batches = source.batches(np.arange(source.num_samples), size, split, epoch=0)
    return evaluate_batches(replicas, batches, how, is_alone)


def evaluate_batches(
    replicas: ReplicaSet, batches: Iterable[Batch], how: EvalSpec, is_alone: bool = False
) -> dict[str, float]:
    """Every metric of the samples of all batches: a mean, or computed once from the outputs of all.

    All ranks take part; or, `is_alone`, those of this process.
    """
    engine, able = replicas.engine, replicas.placement.ranks_with_all
    if is_alone:
        able = [rank for rank in able if rank in engine.local_ranks]
    sums: dict[str, list[list[float]]] = {}
    outputs: list[Any] = []  # in the order of the samples
    for batch in batches:
        eval_batches = split_into_eval_batches(batch.num_samples, how.batch_size)
        shares = dict(zip(able, split_over_ranks(len(eval_batches), len(able)), strict=True))

        def work(rank: int, device: Device, replica: Replica) -> list[Any]:
            own = [eval_batches[number] for number in shares.get(rank, ())]  # noqa: B023 - called in this iteration only
            return [replica.measure(*batch.fetch(rank, part.start, part.stop)) for part in own]  # noqa: B023

        local = engine.each("evaluation", work, replicas.local)
        for of_rank in local if is_alone else engine.all_gather(local):
            for found, output in of_rank:
                outputs.append(output)
                for name, value in found.items():
                    sums.setdefault(name, []).append(value)
    means = {name: _quotient(*map(math.fsum, zip(*pairs, strict=True))) for name, pairs in sums.items()}
    return means if how.whole_set is None or not outputs else means | how.whole_set(outputs)


def _quotient(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def split_into_eval_batches(num_samples: int, eval_batch_size: int) -> list[range]:
    """Parts of at most `eval_batch_size` samples, whose sizes differ by at most one."""
    return split_into_shards(num_samples, -(-num_samples // eval_batch_size))
