"""A chain of layers onto devices of given speeds and memory, as stages: the best cut there is, found exactly.

The step of a pipeline is as slow as its slowest stage, so the best cut is the one whose slowest stage is fastest. It is
found by dynamic programming: the best for the layers from i on, on the devices from p on, is the best of all first
stages and of the best for the rest. Devices come in the order in which they are given, or in any.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple


class Chain(NamedTuple):
    """Layers one after the other."""

    costs: Sequence[float]  # of each layer, on a device of speed 1
    crossing: Sequence[float] = ()  # [i]: what a cut before layer i + 1 costs on both of its sides
    memory: Sequence[float] = ()  # that each layer takes: parameters, gradients, the optimizer's state
    kept: Sequence[float] = ()  # and for each shard that is under way: activations


class NamedChain(NamedTuple):
    """Layers with their names; costs, memory (entries of parameters) and activations (entries) are for a sample."""

    names: list[str]
    chain: Chain


NO_CHAIN = NamedChain([], Chain([]))


class StageDevice(NamedTuple):
    """A device that can have a stage."""

    speed: float = 1.0
    memory: float = math.inf


class Cuts(NamedTuple):
    """The layers that all stages but the first begin with, the device of each stage, and the slowest stage's time."""

    starts: list[int]
    order: list[int]
    cost: float


class _Stages:
    """What a stage costs, and what it takes."""

    def __init__(self, chain: Chain) -> None:
        self.num_layers = len(chain.costs)
        none = [0.0] * self.num_layers
        self._costs, self._memory, self._kept = (
            [0.0, *accumulate(values or none)] for values in (chain.costs, chain.memory, chain.kept)
        )
        self._crossing = [0.0, *(chain.crossing or none[1:]), 0.0]

    def cost(self, start: int, stop: int, place: StageDevice) -> float:
        """The time of a stage, with what its cuts cost."""
        passes = (self._costs[stop] - self._costs[start]) / place.speed
        return passes + self._crossing[start] + self._crossing[stop]

    def fits(self, start: int, stop: int, place: StageDevice, in_flight: int) -> bool:
        """Whether a device has the memory for a stage."""
        if place.memory == math.inf:
            return True
        kept = self._kept[stop] - self._kept[start]
        return self._memory[stop] - self._memory[start] + in_flight * kept <= place.memory


def place_stages(chain: Chain, places: Sequence[StageDevice], in_flight: Sequence[int] = ()) -> Cuts | None:
    """The best cut for devices in this order, one stage each; None where no cut fits into their memory.

    `in_flight[p]` is the number of shards that the stage at place p has under way. Among equals, the first cuts come as
    early as they can.

    >>> place_stages(Chain([4, 1, 1, 2]), [StageDevice(), StageDevice(speed=3)])
    Cuts(starts=[1], order=[0, 1], cost=4.0)
    """
    stages, num_layers, num_places = _Stages(chain), len(chain.costs), len(places)
    flights = list(in_flight) or [1] * num_places
    best: dict[int, tuple[float, int]] = {num_layers: (0.0, num_layers)}  # of the rest, by its first layer
    tables = []
    for at in range(num_places - 1, -1, -1):
        found = {}
        for start in range(at, num_layers):
            options = (
                (max(stages.cost(start, stop, places[at]), best[stop][0]), stop)
                for stop in range(start + 1, num_layers + 1)
                if stop in best and stages.fits(start, stop, places[at], flights[at])
            )
            if (chosen := min(options, default=None)) is not None:
                found[start] = chosen
        best = found
        tables.append(found)
    if 0 not in best:
        return None
    starts, at = list[int](), 0
    for table in reversed(tables):
        at = table[at][1]
        starts.append(at)
    return Cuts(starts[:-1], list(range(num_places)), best[0][0])


def place_in_any_order(chain: Chain, places: Sequence[StageDevice], in_flight: Sequence[int] = ()) -> Cuts | None:
    """The best cut over all orders of the devices, too. Devices that are alike count once.

    >>> place_in_any_order(Chain([4, 1, 1, 2]), [StageDevice(), StageDevice(speed=3)]).order
    [1, 0]
    """
    stages, num_layers, num_places = _Stages(chain), len(chain.costs), len(places)
    flights, kinds = list(in_flight) or [1] * num_places, sorted(set(places), reverse=True)
    counts = tuple(places.count(kind) for kind in kinds)

    @cache
    def best(start: int, left: tuple[int, ...]) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        """For the layers from `start` on and these devices: the time, the ends of stages, and their kinds."""
        if not sum(left):
            return (0.0 if start == num_layers else math.inf), (), ()
        at = num_places - sum(left)
        found: tuple[float, tuple[int, ...], tuple[int, ...]] = (math.inf, (), ())
        last = num_layers - sum(left) + 1
        for kind, number in enumerate(left):
            rest = (*left[:kind], number - 1, *left[kind + 1 :])
            for stop in range(start + 1, last + 1) if number else ():
                if stages.fits(start, stop, kinds[kind], flights[at]):
                    after, ends, used = best(stop, rest)
                    cost = max(stages.cost(start, stop, kinds[kind]), after)
                    found = min(found, (cost, (stop, *ends), (kind, *used)))
        return found

    cost, ends, used = best(0, counts)
    if cost == math.inf:
        return None
    free = [[number for number, place in enumerate(places) if place == kind] for kind in kinds]
    return Cuts(list(ends[:-1]), [free[kind].pop(0) for kind in used], cost)
