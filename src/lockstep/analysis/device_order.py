"""Devices of unequal speed or memory, each with a stage of the network: an order that suits them better than theirs."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from lockstep.analysis.candidates import bandwidth_of, place_of
from lockstep.analysis.placement import best_cut
from lockstep.analysis.profile import Profile
from lockstep.analysis.step_costs import Configuration, Hardware, PlannedStep, pipeline_of, predict

MAX_SEARCH = 1_000_000  # stages that are compared, about: a second


class OtherOrder(NamedTuple):
    """The devices as they should come, by their numbers now, and what a step takes then."""

    order: tuple[int, ...]
    starts: tuple[str, ...]  # of the stages, but for the first
    num_shards: int
    milliseconds: float

    def sentence(self) -> str:
        """What a plan says about it."""
        order = ",".join(map(str, self.order))
        return (
            f"With the devices in the order {order} (from 0, as they are now), --split network --shards "
            f"{self.num_shards} --stages {','.join(self.starts)} would take {self.milliseconds:,.1f} ms. List them "
            f"in that order in --devices."
        )


def fastest_order(profile: Profile, configurations: Iterable[Configuration], hardware: Hardware) -> OtherOrder | None:
    """The fastest of these configurations in orders of their devices that are not the given one."""
    found = [other for each in configurations if (other := _in_best_order(profile, each, hardware)) is not None]
    return min(found, key=lambda other: other.milliseconds, default=None)


def _in_best_order(profile: Profile, configuration: Configuration, hardware: Hardware) -> OtherOrder | None:
    """A pipeline with its devices in the best order; None where that is theirs, or would take long to find."""
    grid, number = configuration.grid, configuration.num_devices
    if number == 1 or grid.network < number:
        return None
    places = [place_of(hardware, grid, at) for at in range(number)]
    left = math.prod(places.count(kind) + 1 for kind in set(places))  # how many sets of devices there are
    if len(set(places)) == 1 or left * len(set(places)) * len(profile.layers) ** 2 > MAX_SEARCH:
        return None
    pipeline = pipeline_of(configuration, profile.batch_size)
    cut = best_cut(profile, places, pipeline, bandwidth_of(hardware), in_any_order=True)
    if cut is None or cut.order == list(range(number)):
        return None
    starts = tuple(profile.layers[start].name for start in cut.starts)
    speeds = tuple(hardware.speed(rank) for rank in cut.order)
    memories = tuple(hardware.memory(rank, number) for rank in cut.order)
    own, ordered = configuration._replace(starts=starts), hardware._replace(speeds=speeds, memories=memories)
    if not PlannedStep(profile, own, ordered).fits():
        return None
    seconds = predict(profile, own, ordered).seconds
    return OtherOrder(tuple(cut.order), starts, configuration.num_shards, 1e3 * seconds)
