"""Metrics on all devices, each test sample counted exactly once: the text's fourth exercise.

The samples are cut into pieces of a fixed size whatever the number of devices, so a sample meets the same kernels, and
gets the same answer, on any of them. The pieces' sums are added with one rounding, at the end: that has no order.
"""

import math
from collections.abc import Iterable

import numpy as np

from lockstep.core.device import Device
from lockstep.data.batch import Batch, BatchSource
from lockstep.partition.batch import split_into_shards
from lockstep.partition.ranks import split_over_ranks
from lockstep.replicas.replica import Replica
from lockstep.training.replica_set import ReplicaSet


def evaluate(replicas: ReplicaSet, source: BatchSource, piece: int, batch_size: int) -> dict[str, float]:
    """Every metric, as the mean over all samples of `source`, in their own order."""
    size = source.num_samples if source.in_memory else batch_size
    order = np.arange(source.num_samples)
    batches = source.batches(order, size, lambda num_samples: cut_into_pieces(num_samples, piece), epoch=0)
    return evaluate_batches(replicas, batches, piece)


def evaluate_batches(replicas: ReplicaSet, batches: Iterable[Batch], piece: int) -> dict[str, float]:
    """Every metric, as the mean over the samples of all batches, `piece` samples being computed together."""
    engine, able = replicas.engine, replicas.placement.ranks_with_all
    sums: dict[str, list[float]] = {}
    num_samples = 0
    for batch in batches:
        num_samples += batch.num_samples
        pieces = cut_into_pieces(batch.num_samples, piece)
        shares = dict(zip(able, split_over_ranks(len(pieces), len(able)), strict=True))

        def work(rank: int, device: Device, replica: Replica) -> list[dict[str, float]]:
            own = [pieces[number] for number in shares.get(rank, ())]  # noqa: B023 - used within this turn of the loop
            return [replica.measure(*batch.fetch(rank, part.start, part.stop)) for part in own]  # noqa: B023

        for measured in engine.all_gather(engine.each("evaluation", work, replicas.local)):
            for metrics in measured:
                for name, value in metrics.items():
                    sums.setdefault(name, []).append(value)
    return {name: math.fsum(values) / num_samples for name, values in sums.items()}


def cut_into_pieces(num_samples: int, piece: int) -> list[range]:
    """Parts of at most `piece` samples, whose sizes differ by at most one."""
    return split_into_shards(num_samples, -(-num_samples // piece))
