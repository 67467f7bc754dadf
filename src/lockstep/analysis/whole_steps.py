"""Whole steps, run as they are in a run: they show what instructions that are timed one by one do not.

On a GPU, instructions are launched ahead, or replayed as a CUDA graph. Where devices share a machine, they slow each
other down by more than passes of the same size that begin together: memory, caches and threads are used differently.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median

from lockstep.analysis.curves import Curve, curve_of
from lockstep.analysis.profile import Profile
from lockstep.analysis.real_run import opened_run
from lockstep.analysis.step_costs import Configuration, Hardware, predict
from lockstep.analysis.timing import middle
from lockstep.analysis.unmeasurable import cannot_be_measured
from lockstep.config import DEFAULT_SLICES, RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import OutOfMemory
from lockstep.partition.grid import Grid
from lockstep.training.setup import Prepared

MIN_STEPS, MAX_STEPS = 2, 12  # of a configuration
STEPS_SECONDS = 1.0  # for the steps of a configuration beyond those
MAX_NUMBERS = 6  # of shards, whose steps on one GPU are measured: a second or two for each
SHARED = Hardware()
Prepare = Callable[[RunConfig], Prepared]
HasTime = Callable[[], bool]


def alone(config: RunConfig, device: Device, num_shards: Sequence[int], prepare: Prepare) -> Curve | None:
    """The time of a step on one GPU by the number of shards: those of a few numbers, the fewest and the most first.

    Not of some in between only: kernels for another size may be others, and half as fast.
    """
    numbers, points = sorted(num_shards), list[tuple[float, float]]()
    for number in list(dict.fromkeys((numbers[0], numbers[-1], *numbers)))[:MAX_NUMBERS]:
        own = replace(config, devices=str(device), num_shards=number)
        with cannot_be_measured(), suppress(OutOfMemory), opened_run(own, prepare(own)) as run:
            run.seconds_per_step(5)  # loads things, and captures
            points.append((number, median(run.seconds_per_step(10) for _ in range(3))))
    return curve_of(points) if points else None


class Corrections:
    """How many times as long as on the clock steps of several devices take. What the time is too short for is 1."""

    def __init__(self, config: RunConfig, num_shards: Sequence[int], prepare: Prepare, has_time: HasTime) -> None:
        self._config, self._num_shards, self._prepare, self._has_time = config, num_shards, prepare, has_time

    def of(self, profile: Profile, devices: Sequence[Device]) -> dict[tuple[int, str], Curve]:
        """Those of a step of all these devices, for each way of splitting that was measured, by number of shards."""
        found: dict[tuple[int, str], Curve] = {}
        for grid, starts in _grids(profile, len(devices)):
            points = list[tuple[float, float]]()
            for number in _ends(number for number in self._num_shards if number >= grid.data):
                if self._has_time():
                    with cannot_be_measured(), suppress(OutOfMemory):
                        expected = predict(profile, Configuration(grid, number, starts, self._config.pipeline), SHARED)
                        points.append((number, self._seconds(grid, starts, number, devices) / expected.seconds))
            if points:
                found[grid.num_ranks, grid.kind] = curve_of(points)
        return found

    def _seconds(self, grid: Grid, starts: Sequence[str], num_shards: int, devices: Sequence[Device]) -> float:
        """The time of a step, once what it needs is loaded."""
        config = replace(self._config, devices=",".join(map(str, devices)), num_shards=num_shards, split=str(grid))
        slices = DEFAULT_SLICES if grid.layers > 1 and not config.num_slices else config.num_slices
        config = replace(config, stages=",".join(starts) or None, num_slices=slices)
        with opened_run(config, self._prepare(config)) as run:
            times, number = list[float](), MIN_STEPS
            run.seconds_per_step()
            while len(times) < number:
                times.append(run.seconds_per_step())
                number = min(MAX_STEPS, max(MIN_STEPS, int(STEPS_SECONDS / max(min(times), 1e-6))))
        return middle(times)


def _grids(profile: Profile, number: int) -> list[tuple[Grid, tuple[str, ...]]]:
    found: list[tuple[Grid, tuple[str, ...]]] = [(Grid(number), ())]
    found += [(Grid(network=number), starts) for starts in profile.stages if len(starts) == number - 1]
    if profile.sliced is not None and number == 2:
        found.append((Grid(layers=number), ()))
    return found


def _ends(numbers: Iterable[int]) -> list[int]:
    """The smallest and the largest of them."""
    found = sorted(numbers)
    return sorted({found[0], found[-1]}) if found else []
