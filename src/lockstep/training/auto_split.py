"""`--split auto`: what devices share, chosen for the model and the devices when a run starts.

Every device has the whole model where that fits into its memory: of all splits that communicates least. Where it does
not, the network is cut into as few stages as make it fit, which the rest of the devices have copies of. The choice
depends on shapes, on the settings and on the memory of the smallest device, and on no measurement: so all ranks come to
the same, and a run that is resumed does, too. (It would not change a bit of the weights if it did not.)
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from lockstep.backends.hardware import cpu, memory_of_gpus
from lockstep.config import RunConfig, check_ranks
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.partition.chain import Chain, Cuts, NamedChain, StageDevice, place_stages
from lockstep.partition.grid import AUTO, Grid
from lockstep.report.console import fetch_progress, size
from lockstep.training.setup import find_data, prepare
from lockstep.training.split_checks import check_split
from lockstep.training.task import UserObjects

USABLE = 0.9  # of a device's memory: the framework needs some
GRADIENTS = 3  # that are alive at a time, about: a leaf, a sum, and what is exchanged
STATES = {"sgd": 0, "adam": 2, "adamw": 2}  # vectors of the optimizer; others have no more than Adam


class WithSplit(NamedTuple):
    """The settings of a run, with a split in the place of `auto`."""

    config: RunConfig
    objects: UserObjects | None  # of the user, with the data that was loaded for the choice
    notes: list[str]  # for the user


def with_split(
    config: RunConfig,
    objects: UserObjects | None,
    devices: list[Device] | None = None,
    least_of_all: Callable[[float], float] | None = None,
) -> WithSplit:
    """The settings with a split that is chosen, where they leave it open.

    Where ranks choose by themselves, `least_of_all` gives the least of what they have called it with.
    """
    if config.split != AUTO:
        return WithSplit(config, objects, [])
    if config.stages is not None:
        raise ConfigError(f"--split auto finds the stages itself, and --stages {config.stages} names them. Leave one.")
    with fetch_progress() as progress:
        objects = replace(objects or UserObjects(), data=find_data(config, objects or UserObjects(), progress))
    whole = replace(config, split="data")
    prepared = prepare(whole, objects, trains=False, devices=devices)
    number = len(prepared.devices)
    check_ranks(1, config.num_shards)
    found = prepared.task.chain(number)
    limit = memory_limit(prepared.devices)
    if least_of_all is not None:
        limit = least_of_all(limit)
    grid, cuts = choose(whole, objects, found, number, limit)
    chosen = replace(config, split=str(grid) if number > 1 else "data")
    if cuts is not None:
        chosen = replace(chosen, stages=",".join(found.names[start] for start in cuts.starts))
    needed = most_memory(in_bytes(whole, found.chain), cuts.starts if cuts else [], config.num_shards)
    if needed <= limit:
        return WithSplit(chosen, objects, [])
    return WithSplit(chosen, objects, [
        f"--split auto: no split fits. {chosen.split} needs least, about {size(needed)} of a device, which has "
        f"{size(limit)}: the run may fail. More shards need less (--shards; other weights), and so do more devices."
    ])  # fmt: skip


def choose(
    config: RunConfig, objects: UserObjects, found: NamedChain, num_devices: int, limit: float
) -> tuple[Grid, Cuts | None]:
    """The fewest stages that fit into the memory of a device; the most that can be, where none do."""
    chain = in_bytes(config, found.chain)
    best: tuple[Grid, Cuts | None] | None = None
    for stages in range(1, num_devices + 1):
        grid = Grid(num_devices // stages, stages)
        if num_devices % stages or grid.data > config.num_shards or stages > max(1, len(found.names)):
            continue
        if stages > 1 and not can_be_cut(config, grid, objects):
            break
        in_flight = [min(stages - place, config.num_shards) for place in range(stages)]
        cuts = place_stages(chain, [StageDevice(memory=limit)] * stages, in_flight) if found.names else None
        if stages == 1:
            best = grid, None
            if cuts is not None or not found.names:
                return best
        elif cuts is not None:
            return grid, cuts
        else:
            best = grid, place_stages(chain, [StageDevice()] * stages)
    if best is None:
        check_ranks(num_devices, config.num_shards)  # which says what to do
        raise ConfigError(f"{num_devices} devices cannot share this model and batch. Use another --devices or --split.")
    return best


def most_memory(chain: Chain, starts: list[int], num_shards: int) -> float:
    """What the fullest stage takes: its parameters and what belongs to them, and the shards that it has under way."""
    cuts = [0, *starts, len(chain.costs)]
    return max(
        sum(chain.memory[start:stop]) + min(len(cuts) - 1 - place, num_shards) * sum(chain.kept[start:stop])
        for place, (start, stop) in enumerate(pairwise(cuts))
    )


def can_be_cut(config: RunConfig, grid: Grid, objects: UserObjects) -> bool:
    """Whether the other settings go together with a network that is split."""
    try:
        check_split(config, grid, objects)
    except ConfigError:
        return False
    return True


def in_bytes(config: RunConfig, chain: Chain) -> Chain:
    """What the layers take of a device's memory in a run with these settings."""
    states = STATES.get(config.optimizer, 2) + (config.momentum > 0) + (config.ema is not None)
    num_samples = -(-config.batch_size // config.num_shards)
    return chain._replace(
        memory=[4.0 * (1 + GRADIENTS + states) * entries for entries in chain.memory or [0.0] * len(chain.costs)],
        kept=[4.0 * num_samples * entries for entries in chain.kept or [0.0] * len(chain.costs)],
    )


def memory_limit(devices: list[Device]) -> float:
    """The memory that a rank can use: that of its GPU, or its share of the machine's."""
    if devices[0].kind == "cpu":
        return USABLE * cpu().num_bytes / len(devices)
    most = max(devices.count(device) for device in devices)
    return USABLE * min(memory_of_gpus(), default=10**15) / most
