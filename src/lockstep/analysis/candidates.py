"""The configurations that a plan looks at: numbers of devices, ways of splitting, numbers of shards."""

import math
from collections.abc import Iterator, Sequence

from lockstep.analysis.placement import best_cut
from lockstep.analysis.profile import Profile
from lockstep.analysis.step_costs import Configuration, Hardware, PlannedStep, pipeline_of
from lockstep.config import RunConfig
from lockstep.partition.buckets import BUCKET_MB
from lockstep.partition.chain import StageDevice
from lockstep.partition.grid import Grid

ALL_NUMBERS = 8  # of devices: up to here each is looked at, then powers of two, and the largest
MAX_PER_COUNT = 24  # grids of one number of devices


def device_numbers(max_devices: int) -> list[int]:
    """The numbers of devices that are looked at.

    >>> device_numbers(40)
    [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 40]
    """
    found = {number for number in range(1, max_devices + 1) if number <= ALL_NUMBERS}
    power = 2 * ALL_NUMBERS
    while power < max_devices:
        found.add(power)
        power *= 2
    return sorted(found | {max_devices})


def grids(number: int, max_network: int, max_layers: int) -> list[Grid]:
    """The ways in which so many devices can be split; those that split data most come first.

    >>> [str(grid) for grid in grids(4, max_network=4, max_layers=1)]
    ['data=4', 'data=2,network=2', 'network=4']
    """
    found = [
        Grid(number // (network * layers), network, layers)
        for network in range(1, min(number, max_network) + 1)
        for layers in range(1, min(number // network, max_layers) + 1)
        if number % (network * layers) == 0
    ]
    return sorted(found, key=lambda grid: (-grid.data, -grid.network))[:MAX_PER_COUNT]


def configurations(
    profile: Profile, config: RunConfig, numbers: Sequence[int], shards: Sequence[int], hardware: Hardware
) -> Iterator[Configuration]:
    """All that can be run: every device has work, and every stage a layer."""
    max_layers = 1 if profile.sliced is None else config.num_slices or 8
    for number in numbers:
        for grid in grids(number, len(profile.layers) or 1, max_layers):
            for num_shards in shards:
                if grid.data <= min(num_shards, config.batch_size):
                    yield from _of_grid(profile, config, grid, num_shards, hardware)


def _of_grid(
    profile: Profile, config: RunConfig, grid: Grid, num_shards: int, hardware: Hardware
) -> Iterator[Configuration]:
    shards_update = config.update == "sharded" and grid.data > 1
    found = Configuration(grid, num_shards, (), config.pipeline, config.exchange, shards_update)
    found = found._replace(bucket_mb=_bucket_mb(profile, config))
    if grid.network == 1:
        is_balanced = not grid.splits_model and not shards_update and not hardware.are_equal(grid.num_ranks)
        yield found._replace(is_balanced=is_balanced)
        return
    if config.stages is not None:
        starts = tuple(name.strip() for name in config.stages.split(","))
        if len(starts) == grid.network - 1 and set(starts) <= {layer.name for layer in profile.layers[1:]}:
            yield found._replace(starts=starts)
        return
    are_equal = hardware.are_equal(grid.num_ranks)
    cuts = [found._replace(starts=starts) for starts in profile.stages if are_equal and len(starts) == grid.network - 1]
    if measured := [cut for cut in cuts if PlannedStep(profile, cut, hardware).fits()]:
        yield measured[0]
        return
    bandwidth, pipeline = bandwidth_of(hardware), pipeline_of(found, profile.batch_size)
    places = [place_of(hardware, grid, place) for place in range(grid.network)]
    without_limit = [place._replace(memory=math.inf) for place in places]
    for devices in (places, without_limit):  # the second will be marked: it is the best there is, and does not fit
        if (cut := best_cut(profile, devices, pipeline, bandwidth)) is not None:
            yield found._replace(starts=tuple(profile.layers[start].name for start in cut.starts))
            return


def _bucket_mb(profile: Profile, config: RunConfig) -> float:
    """The size of buckets: the user's, or the usual one where ranks do not share cores in one process."""
    if config.bucket_mb is not None:
        return config.bucket_mb
    return BUCKET_MB if profile.engine == "processes" else 0.0


def bandwidth_of(hardware: Hardware) -> float:
    """Of the link that was described."""
    return math.inf if hardware.link is None else hardware.link.bandwidth


def place_of(hardware: Hardware, grid: Grid, place: int) -> StageDevice:
    """The slowest device that has a stage, with the memory of the smallest."""
    ranks = [rank for rank in range(grid.num_ranks) if grid.at(rank).network == place]
    speed = min(hardware.speed(rank) for rank in ranks)
    return StageDevice(speed, min(hardware.memory(rank, grid.num_ranks) for rank in ranks))
