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
from lockstep.core.errors import RunError
from lockstep.data.batch import Batch, BatchSource
from lockstep.parallel.combined import measurement
from lockstep.partition.batch import split_into_shards
from lockstep.partition.ranks import split_over_ranks
from lockstep.replicas.replica import Replica
from lockstep.runtime.engine import StepInput
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
    engine, placement = replicas.engine, replicas.placement
    able = list(engine.local_ranks if is_alone else range(engine.num_ranks))
    if is_alone and not placement.is_replicated and len(able) < engine.num_ranks:
        raise RunError(
            "A callback is called on one rank, and the model is split between several: it cannot be evaluated there. "
            "Use the metrics of on_epoch, or --engine inprocess."
        )
    sums: dict[str, list[list[float]]] = {}
    outputs: list[Any] = []  # in the order of the samples
    for batch in batches:
        eval_batches = split_into_eval_batches(batch.num_samples, how.batch_size)
        if not placement.is_replicated:
            found_by_all = _measured_by_parts(replicas, batch, eval_batches)
            _count(found_by_all, sums, outputs)
            continue
        shares = dict(zip(able, split_over_ranks(len(eval_batches), len(able)), strict=True))

        def work(rank: int, device: Device, replica: Replica) -> list[Any]:
            own = [eval_batches[number] for number in shares.get(rank, ())]  # noqa: B023 - called in this iteration only
            return [replica.evaluate(*batch.fetch(rank, part.start, part.stop)) for part in own]  # noqa: B023

        local = engine.each("evaluation", work, replicas.local)
        _count(local if is_alone else engine.all_gather(local), sums, outputs)
    means = {name: _quotient(*map(math.fsum, zip(*pairs, strict=True))) for name, pairs in sums.items()}
    return means if how.whole_set is None or not outputs else means | how.whole_set(outputs)


def _measured_by_parts(replicas: ReplicaSet, batch: Batch, eval_batches: list[range]) -> list[Any]:
    """What the ranks with the last stage have found of samples that have gone through all."""
    engine, (grid, stages, _) = replicas.engine, replicas.placement
    schedule = measurement(grid, stages, tuple(split_over_ranks(len(eval_batches), grid.data)))
    local = engine.evaluate(schedule, replicas.local, StepInput(0, batch, eval_batches))
    found = engine.all_gather(local)
    return [found[rank] for rank in schedule.ranks_with_losses()]


def _count(found: list[Any], sums: dict[str, list[list[float]]], outputs: list[Any]) -> None:
    """Takes note of what ranks have found."""
    for of_rank in found:
        for measured, output in of_rank:
            outputs.append(output)
            for name, value in measured.items():
                sums.setdefault(name, []).append(value)


def _quotient(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def split_into_eval_batches(num_samples: int, eval_batch_size: int) -> list[range]:
    """Parts of at most `eval_batch_size` samples, whose sizes differ by at most one."""
    return split_into_shards(num_samples, -(-num_samples // eval_batch_size))
