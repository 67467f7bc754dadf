"""The schedule of a step that is split in several ways at once: data, network, layers, and the update.

Every rank is in one pipeline, or in none, and exchanges gradients with those that hold the same part of the model.
"""

from functools import lru_cache
from typing import NamedTuple

from lockstep.parallel.data import DataParallel, compute, exchange
from lockstep.parallel.pipeline import Pipeline, pipeline_compute, pipeline_measure
from lockstep.parallel.sharded_update import all_gather_parameters, reduce_scatter
from lockstep.partition.grid import Grid
from lockstep.schedules.instructions import (
    AllGather,
    Evaluate,
    GatherNorms,
    Instruction,
    Partial,
    RankProgram,
    Schedule,
    Update,
)


class StagePart(NamedTuple):
    """What one stage is to the ranks that hold it, or a share of its layers."""

    stage: int
    data: DataParallel  # the shards of each of them, and the stage's entries of their flat vector
    owned: tuple[range, ...] = ()  # sharded update: the entries that each of them updates


class StageShape(NamedTuple):
    """The entries of a stage in the flat vector of those that hold it, and which of them each updates."""

    stage: int
    entries: range
    owned: tuple[range, ...] = ()  # empty: every rank updates all


class ModelSplit(NamedTuple):
    """How a model, or its update, is split: what stays the same from step to step."""

    grid: Grid
    stages: tuple[int, ...]
    parts: tuple[tuple[StageShape, ...], ...]
    order: str
    gathers_norms: bool

    def step(self, shards: tuple[range, ...], exchange: str, together: bool) -> "CombinedStep":
        """A step in which the d-th copy of the model has the shards `shards[d]`."""

        def part(shape: StageShape) -> StagePart:
            data = DataParallel(shards, shape.entries, (shape.entries,), exchange, together)
            return StagePart(shape.stage, data, shape.owned)

        parts = tuple(tuple(map(part, shapes)) for shapes in self.parts)
        return CombinedStep(self.grid, self.stages, parts, self.order, self.gathers_norms)


class CombinedStep(NamedTuple):
    """What a step depends on that is split in any way."""

    grid: Grid
    stages: tuple[int, ...]  # the place in a pipeline of each stage of the network
    parts: tuple[tuple[StagePart, ...], ...]  # the stages of each part of the model
    order: str = "1f1b"  # of the shards in a pipeline
    gathers_norms: bool = False  # to clip by the norm of what no rank has alone


@lru_cache(maxsize=256)
def combined(step: CombinedStep) -> Schedule:
    """The schedule. Where only the data is split, and every rank updates everything, it is `data_parallel`'s."""
    grid, programs = step.grid, []
    for rank in range(grid.num_ranks):
        at, parts, ranks = grid.at(rank), step.parts[rank % grid.num_parts], grid.replicas_of(rank)
        own = parts[0].data.shards[at.data]
        if grid.network > 1:
            datas = {part.stage: part.data for part in parts}
            computed = pipeline_compute(datas, own, pipeline_of(grid, rank, step.stages), at.network, step.order)
        else:
            computed = compute(parts[0].data, own)
        exchanged, total, gathered = list[Instruction](), list[Partial](), list[Instruction]()
        for number, part in enumerate(parts):
            if part.owned:
                made, sums = reduce_scatter(part.data, at.data, ranks, part.owned, number)
                gathered += all_gather_parameters(at.data, ranks, part.owned, number)
            else:
                made, sums = exchange(part.data, at.data, ranks, number * len(part.data.buckets))
            exchanged += made
            total += sums
        update = [*([GatherNorms()] if step.gathers_norms else []), Update(tuple(total)), *gathered]
        entries = range(parts[0].data.entries.start, parts[-1].data.entries.stop)
        programs.append(RankProgram((*computed, AllGather()), tuple(exchanged), tuple(update), entries))
    overlaps = any(len(part.data.buckets) > 1 for parts in step.parts for part in parts)
    num_shards = sum(map(len, step.parts[0][0].data.shards))
    return Schedule(tuple(programs), num_shards, overlaps, grid.layers, step.stages)


@lru_cache(maxsize=256)
def measurement(grid: Grid, stages: tuple[int, ...], shares: tuple[range, ...]) -> Schedule:
    """The schedule that evaluates batches of samples; those in `shares[d]` go through the d-th copy of the model."""
    programs = []
    for rank in range(grid.num_ranks):
        at = grid.at(rank)
        own = shares[at.data]
        found: list[Instruction] = [Evaluate(number, 0) for number in own]
        if grid.network > 1:
            found = pipeline_measure(own, pipeline_of(grid, rank, stages), at.network)
        programs.append(RankProgram(tuple(found), (), (), range(0)))
    return Schedule(tuple(programs), sum(map(len, shares)), False, grid.layers, stages)


def pipeline_of(grid: Grid, rank: int, stages: tuple[int, ...]) -> Pipeline:
    """The pipeline that a rank is in."""
    at = grid.at(rank)
    return Pipeline(tuple(grid.rank(at._replace(network=place)) for place in range(grid.network)), stages)
