"""A chain of layers into stages: contiguous, and the slowest as fast as can be.

Late layers of many networks have most of the parameters, and early ones most of the work. Where a device could not
have its share of both, it gets two stages, an early one and a late one: there and back.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from lockstep.core.errors import ConfigError
from lockstep.partition.chain import Chain, StageDevice, place_stages

MEMORY_WEIGHT = 0.9  # a share of the memory counts as this share of the time
MIN_GAIN = 0.9  # there and back has to be this much better: it communicates twice as much, and waits more
MAX_LAYERS = 40  # of a chain that is folded: the time to find the best grows with the fourth power


class Stages(NamedTuple):
    """Where stages begin in a chain of layers, but for the first; and the place in a pipeline of each."""

    starts: list[int]
    places: tuple[int, ...]


def choose_stages(
    costs: Sequence[float], memory: Sequence[float], crossing: Sequence[float], num_places: int
) -> Stages:
    """Stages for so many devices: one each, or two where that shares out the memory much better."""
    straight = Stages(balanced_stages(costs, crossing, num_places), tuple(range(num_places)))
    if num_places == 1 or not 2 * num_places - 1 <= len(costs) <= MAX_LAYERS or not sum(memory):
        return straight
    folded = Stages(folded_stages(costs, memory, num_places), there_and_back(num_places))
    even = Stages(balanced_stages(costs, [0.0] * len(crossing), num_places), straight.places)
    best_straight = min(load_of(costs, memory, straight), load_of(costs, memory, even))
    return folded if load_of(costs, memory, folded) < MIN_GAIN * best_straight else straight


def there_and_back(num_places: int) -> tuple[int, ...]:
    """The places of stages that go through all devices and back.

    >>> there_and_back(3)
    (0, 1, 2, 1, 0)
    """
    return (*range(num_places), *range(num_places - 2, -1, -1))


def load_of(costs: Sequence[float], memory: Sequence[float], stages: Stages) -> float:
    """The largest share of time, or of memory, of a device."""
    ends = [*stages.starts, len(costs)]
    loads = [[0.0, 0.0] for _ in range(max(stages.places) + 1)]
    for place, start, end in zip(stages.places, [0, *stages.starts], ends, strict=True):
        loads[place][0] += sum(costs[start:end]) / (sum(costs) or 1.0)
        loads[place][1] += MEMORY_WEIGHT * sum(memory[start:end]) / (sum(memory) or 1.0)
    return max(max(load) for load in loads)


def folded_stages(costs: Sequence[float], memory: Sequence[float], num_places: int) -> list[int]:
    """Where the stages of `there_and_back` begin, so that the largest load of a device is the smallest that there is.

    >>> folded_stages([1, 1, 1, 1], memory=[0, 0, 1, 1], num_places=2)
    [1, 3]
    """
    num_layers = len(costs)
    time, room = ([0.0, *accumulate(values)] for values in (costs, memory))
    all_time, all_room = time[-1] or 1.0, room[-1] or 1.0

    def load(*ranges: tuple[int, int]) -> float:
        share = sum(time[stop] - time[start] for start, stop in ranges) / all_time
        return max(share, MEMORY_WEIGHT * sum(room[stop] - room[start] for start, stop in ranges) / all_room)

    @cache
    def best(start: int, stop: int, num_left: int) -> tuple[float, tuple[int, ...]]:
        """For the layers from start to stop on so many devices: the largest load, and where stages begin."""
        if num_left == 1:
            return load((start, stop)), ()
        options = []
        for first in range(start + 1, stop - 2 * num_left + 3):
            for last in range(first + 2 * num_left - 3, stop):
                inner, cuts = best(first, last, num_left - 1)
                options.append((max(inner, load((start, first), (last, stop))), (first, *cuts, last)))
        return min(options)

    return list(best(0, num_layers, num_places)[1])


def balanced_stages(costs: Sequence[float], crossing: Sequence[float], num_stages: int) -> list[int]:
    """Where stages 1, 2, ... begin in a chain of layers with these costs.

    `crossing[i]` is the cost, on both sides, of a cut before layer i + 1. The largest cost of a stage is the smallest
    that there is; among equals, the first cuts come as early as they can.

    >>> balanced_stages([4, 1, 1, 2], crossing=[0, 0, 0], num_stages=2)
    [1]
    """
    num_layers = len(costs)
    if num_stages > num_layers:
        raise ConfigError(
            f"A network that can be cut into {num_layers} part{'s' * (num_layers > 1)} cannot have {num_stages} "
            f"stages: a stage would be empty. Use at most {num_layers} stages, or split the batch instead "
            f"(--split data)."
        )
    found = place_stages(Chain(costs, crossing), [StageDevice()] * num_stages)
    assert found is not None, "there is no limit to the memory"
    return found.starts
