"""Steps of a probe, as many as the time allows, and what they say about an instruction.

Others may use the machine for a moment, which only makes steps slower. So sizes take turns, several times over, and
medians count; of a few long steps, the quicker.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

from lockstep.analysis.probe import Probe, Timed, TimedStep
from lockstep.core.errors import Interrupted, RunError, first_line
from lockstep.core.interrupts import Interrupts
from lockstep.schedules.instructions import Backward, Forward

TURNS = 4  # of each size
MAX_STEPS = 8  # of a size in a turn
TURN_SECONDS = 0.2  # of a size, or one step
STEP_SECONDS = 0.15  # of one step: it has fewer shards than a step of the run, where it would take longer
MIN_SHARDS = 2  # of a rank in a step, where the run has as many: what is in the caches depends on the one before
MORE_SHARDS, MORE_SECONDS = 4, 0.4  # of shards that take less: sums of several are held, as in a run
MIN_STEPS = 2  # of a size, however long they take
MANY = 8  # steps
SMALLER = 4  # times as small is a size that is measured besides, where the smallest takes long
LONG_SECONDS = 0.8  # of a shard: steps have one of them


class Sampler:
    """Takes the time of steps with shards of several sizes. What does not fit into the time is left out."""

    def __init__(
        self, sizes: Sequence[int], batch_size: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Processes that measure together need a `clock` that tells all of them the same time."""
        self._sizes, self._batch_size, self._clock = list(sizes), batch_size, clock
        self.problems: dict[int, str] = {}  # by size, why the model, or the memory, does not take it
        self._until = clock() + seconds
        self._seconds = 0.0  # that the smallest shard takes, once that is known

    def by_size(
        self, probe: Probe, share: float, at_most: int | None = None, own: int = 0
    ) -> dict[int, list[TimedStep]]:
        """Steps by size: the smallest in any case, then the largest, then the others, for a share of the time left.

        A size that the model does not take is left out, and from then on, where `own` is one that it has to take.
        """
        sizes = [size for size in self._sizes if at_most is None or size <= at_most] or [at_most or self._sizes[0]]
        until = self._clock() + share * max(0.0, self._until - self._clock())
        found: dict[int, list[TimedStep]] = {}
        seconds: dict[int, float] = {}  # that a shard of each rank takes
        order = list(dict.fromkeys((sizes[0], sizes[-1], *sizes[1:-1])))
        for size in order:
            is_late = self._clock() + _expected(seconds, size) * (2 + MIN_STEPS) > until
            try:
                if seconds and size > sizes[0] and is_late:
                    if size == own:  # whether the model takes it has to be known
                        probe.run([size] * _copies(probe))
                    continue
                seconds[size] = self._first(probe, size)
                found[size] = [self._step(probe, size, seconds[size]) for _ in range(MIN_STEPS)]
                if size == sizes[0] and seconds[size] > LONG_SECONDS and size >= SMALLER:
                    order.insert(1, size // SMALLER)  # there may be no time for a larger one: two make a line
            except RunError as problem:
                if size == own or isinstance(problem, Interrupted) or (size == order[-1] and not found):
                    raise
                if own:
                    self._leave_out(size, first_line(problem))
        for _ in range(TURNS - 1):
            for size, steps in found.items():
                began = self._clock()
                for _ in range(MAX_STEPS):
                    now = self._clock()
                    if now > until or now - began > TURN_SECONDS:
                        break
                    steps.append(self._step(probe, size, seconds[size]))
        return found

    def _leave_out(self, size: int, reason: str) -> None:
        self.problems[size] = reason
        self._sizes = [other for other in self._sizes if other != size]

    @property
    def small_size(self) -> int:
        """The size of a shard that takes less than a second, where the smallest takes longer."""
        smallest = self._sizes[0]
        return smallest if self._seconds < LONG_SECONDS else max(1, smallest // math.ceil(2 * self._seconds))

    def _first(self, probe: Probe, size: int) -> float:
        """The time of a shard of each rank, after one that loads things."""
        seconds = probe.run([size] * _copies(probe)).seconds
        if seconds < 2 * LONG_SECONDS:
            seconds = probe.run([size] * _copies(probe)).seconds
        if size == self._sizes[0] and not self._seconds:
            self._seconds = seconds
        return seconds

    def _step(self, probe: Probe, size: int, seconds: float) -> TimedStep:
        """A step with as many shards as one of the run has, or as the time allows."""
        copies = _copies(probe)
        in_run = max(1, self._batch_size // (size * copies))
        least = MORE_SHARDS if seconds < MORE_SECONDS else MIN_SHARDS
        number = min(in_run, max(least, int(STEP_SECONDS / max(seconds, 1e-6))))
        if seconds > LONG_SECONDS:
            number = 1
        return probe.run([size] * (number * copies))


@contextmanager
def interruptible_clock() -> Iterator[Callable[[], float]]:
    """A clock to read between steps, when no thread works; it raises where the user has interrupted the program."""
    with Interrupts() as interrupts:

        def clock() -> float:
            if interrupts.requested:
                raise Interrupted("interrupted.")
            return time.monotonic()

        yield clock


def _copies(probe: Probe) -> int:
    return len(probe.devices) if probe.split is None else probe.split.grid.data


def _expected(seconds: dict[int, float], size: int) -> float:
    return max((found * size / known for known, found in seconds.items()), default=0.0)


def middle(values: Iterable[float]) -> float:
    """The median of many values; of few, one that is lower: a single disturbed step would move their median."""
    found = sorted(values)
    if len(found) >= MANY:
        return median(found)
    return found[(len(found) - 1) // 4] if found else 0.0


def typical(steps: Iterable[TimedStep], kind: type) -> float:
    """The time of an instruction of a kind."""
    found = [median(one.seconds for one in step.of(kind)) for step in steps if step.of(kind)]
    return middle(found)


def alone_seconds(steps: Iterable[TimedStep], kind: type, stage: int, slowdown: Callable[[int], float]) -> float:
    """The time of a stage's pass, as it would be if the other ranks had not worked at the same time."""

    def of(step: TimedStep) -> float:
        passes, own = [*step.of(Forward), *step.of(Backward)], list[float]()
        for one in step.of(kind):
            if getattr(one.instruction, "stage", None) == stage:
                own.append(_alone(one, [other for other in passes if other.rank != one.rank], slowdown))
        return median(own)

    return middle(map(of, steps))


def _alone(one: Timed, others: Sequence[Timed], slowdown: Callable[[int], float]) -> float:
    """The work of a pass: each moment of it counts as much as the number of ranks at work has left of its speed."""
    moments = sorted({one.start, one.end, *(at for o in others for at in (o.start, o.end) if one.start < at < one.end)})
    work = 0.0
    for start, end in pairwise(moments):
        num_active = 1 + sum(other.start <= start and other.end >= end for other in others)
        work += (end - start) / slowdown(num_active)
    return work


def rest_of(steps: Iterable[TimedStep]) -> float:
    """The time of a step that is no instruction of its busiest rank."""

    def rest(step: TimedStep) -> float:
        ranks = {one.rank for one in step.instructions}
        return step.seconds - max(sum(o.seconds for o in step.instructions if o.rank == rank) for rank in ranks)

    return max(0.0, middle(map(rest, steps)))
