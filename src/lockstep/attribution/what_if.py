"""What a step would take with another number of shards, or other shares: its schedule on the planner's clock.

Passes, additions and the update cost what they cost in the run. What the schedule does not show (loading, the host, the
link) is as it was: a step is predicted as the measured one, and the difference between two schedules on the clock.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lockstep.attribution.step_times import PASSES, TracedRun, counted_steps, steps_of
from lockstep.core.tracing import NONE, SpanName
from lockstep.partition.balance import shares
from lockstep.partition.ranks import split_over_ranks
from lockstep.schedules.clock import Link, run_on_clock
from lockstep.schedules.instructions import Schedule, Value

MakeSchedule = Callable[[int, tuple[range, ...]], Schedule]  # (shards of a batch, those of each copy of the model)


@dataclass(frozen=True)
class TracedCosts:
    """Seconds of what ranks did in a run, with shards that take `times` as long as those of the run."""

    passes: dict[tuple[int, int, bool], float]  # rank, stage, is it the forward pass? -> seconds alone, of a shard
    adds: float  # of one addition
    updates: Sequence[float]  # of each rank
    contention: float  # how many times as long passes take while all ranks work
    times: float = 1.0

    def forward(self, rank: int, shard: int, stage: int) -> float:
        """A forward pass, with what it takes to get the samples."""
        return self.times * self.passes.get((rank, stage, True), 0.0)

    def backward(self, rank: int, shard: int, stage: int) -> float:
        """A backward pass."""
        return self.times * self.passes.get((rank, stage, False), 0.0)

    def add(self, rank: int, num_entries: int) -> float:
        """The sum of two vectors."""
        return self.adds

    def update(self, rank: int, num_entries: int) -> float:
        """The update."""
        return self.updates[rank]

    def num_bytes(self, value: Value) -> int:
        """The link is not part of the comparison."""
        return 0

    def link(self, rank: int, value: Value | None = None) -> Link:
        """The link is not part of the comparison."""
        return Link()

    def hardware(self, rank: int) -> Hashable:
        """What was measured is that all of them slow each other down."""
        return 0

    def slowdown(self, kind: str, num_active: int) -> float:
        """While one rank works, none."""
        return self.contention if num_active > 1 else 1.0


class WhatIf:
    """Predictions for a run, from its trace."""

    def __init__(self, run: TracedRun, make_schedule: MakeSchedule) -> None:
        self._run, self._make = run, make_schedule
        self._steps = list(steps_of(run).values())
        self.num_copies = len(run.ranks) // len(set(run.parts))
        self._costs = self._measured()
        self._equal = self._seconds(run.num_shards)

    def step_ms(self, step_ms: float, num_shards: int) -> float:
        """The step with so many shards instead."""
        return step_ms + 1e3 * (self._seconds(num_shards) - self._equal)

    def balanced_ms(self, step_ms: float) -> float:
        """The step if faster devices had more of the shards."""
        ranks = range(0, len(self._run.ranks), len(set(self._run.parts)))
        seconds = [fmean(step[rank].passes / max(1, step[rank].num_shards) for step in self._steps) for rank in ranks]
        counts = shares(self._run.num_shards, seconds)
        starts = [sum(counts[:copy]) for copy in range(len(counts) + 1)]
        own = tuple(range(starts[copy], starts[copy + 1]) for copy in range(len(counts)))
        return step_ms + 1e3 * (self._seconds(self._run.num_shards, own) - self._equal)

    def numbers(self) -> list[int]:
        """Numbers of shards whose passes were measured, or half as large as those."""
        references, size = self._run.references, self._size(self._run.num_shards)
        sizes = [size / 2, *(references.alone if references else [])]
        found = {max(1, round(self._run.num_shards * size / other)) for other in sizes}
        return sorted(number for number in found if number >= self.num_copies)

    def _seconds(self, num_shards: int, own: tuple[range, ...] = ()) -> float:
        own = own or tuple(split_over_ranks(num_shards, self.num_copies))
        times = self._alone(self._size(num_shards)) / self._alone(self._size(self._run.num_shards))
        return run_on_clock(self._make(num_shards, own), replace(self._costs, times=times)).seconds

    def _size(self, num_shards: int) -> float:
        """Samples of a shard."""
        return max(self._run.num_samples.values()) / num_shards

    def _alone(self, size: float) -> float:
        """Seconds of a shard of so many samples: on the line between the nearest two that were measured."""
        known = sorted(self._run.references.alone.items()) if self._run.references else []
        if len(known) < 2:
            return size
        right = next((at for at in range(1, len(known)) if size <= known[at][0]), len(known) - 1)
        (x0, y0), (x1, y1) = known[right - 1 : right + 1]
        return max(y0 + (size - x0) * (y1 - y0) / (x1 - x0), 1e-9)

    def _measured(self) -> TracedCosts:
        run, slowdown = self._run, self._run.references.slowdown if self._run.references else 1.0
        counted = set(counted_steps(run))
        passes: dict[tuple[int, int, bool], float] = {}
        for rank in run.ranks:
            num_shards = sum(step[rank.number].num_shards for step in self._steps)
            for one in rank.spans:
                if one.name in PASSES and one.shard != NONE and one.step in counted:
                    key = rank.number, max(one.stage, 0), one.name != SpanName.BACKWARD
                    passes[key] = passes.get(key, 0.0) + one.seconds / max(1, num_shards) / slowdown
        num_adds = max(1, run.num_shards // self.num_copies - 1)
        adds = fmean(fmean(rank.adds for rank in step) for step in self._steps) / num_adds
        updates = [fmean(step[rank.number].update for step in self._steps) for rank in run.ranks]
        return TracedCosts(passes, adds, updates, slowdown)
