"""A configuration on the clock: its schedule with the costs of a profile, its memory, and what limits it."""

import math
from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

from lockstep.analysis.placement import Pipeline
from lockstep.analysis.profile import LayerCost, Profile
from lockstep.parallel.combined import ModelSplit, StageShape, combined
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.balance import shares
from lockstep.partition.batch import even_ranges, split_into_shards
from lockstep.partition.buckets import bucket_ranges
from lockstep.partition.grid import Grid
from lockstep.partition.ranks import split_over_ranks
from lockstep.schedules.clock import ADD, BACKWARD, BUBBLE, EXCHANGE, FORWARD, UPDATE, Clocked, Link, run_on_clock
from lockstep.schedules.instructions import Activation, ActivationGradient, Schedule, Value

COMPUTE, LAUNCH, LOADING = "compute", "launch", "loading"
MAX_ON_CLOCK = 64  # ranks whose every instruction is simulated; of more, those that differ (`large.py`)
MAX_PASSES_ON_CLOCK = 2048  # shards times parts of the model
MIN_WAIT = 0.1  # of a step, for samples that are loaded ahead: whatever else were faster, it would wait for them


class Hardware(NamedTuple):
    """The devices of a plan, where they are not those at hand."""

    speeds: tuple[float, ...] = (1.0,)  # of each device, as a multiple of what was measured; one: of all
    link: Link | None = None  # between all of them; None: what was measured
    is_shared: bool = True  # they are those at hand, and slow each other down
    memories: tuple[float, ...] = (math.inf,)  # bytes of each device; one: of all
    shared_memory: float = math.inf  # bytes that all of them have together

    def speed(self, rank: int) -> float:
        """That of one device."""
        return self.speeds[rank] if len(self.speeds) > 1 else self.speeds[0]

    def memory(self, rank: int, num_ranks: int) -> float:
        """That of one of so many devices."""
        own = self.memories[rank] if len(self.memories) > 1 else self.memories[0]
        return min(own, self.shared_memory / num_ranks)

    def are_equal(self, num_ranks: int) -> bool:
        """Whether the first so many devices have one speed."""
        return len({self.speed(rank) for rank in range(num_ranks)}) == 1


class Configuration(NamedTuple):
    """One way to run a step."""

    grid: Grid
    num_shards: int
    starts: tuple[str, ...] = ()  # of the stages, but for the first
    order: str = "1f1b"  # of the shards in a pipeline
    exchange: str = "sharded"
    shards_update: bool = False
    is_balanced: bool = False  # faster devices get more shards
    bucket_mb: float = 0.0  # of gradients that are exchanged while others are computed; 0: all of them afterwards

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.grid.num_ranks


def pipeline_of(configuration: Configuration, batch_size: int) -> Pipeline:
    """With the largest shard, and as many shards as any copy of the network has."""
    num_shards, num_copies = configuration.num_shards, configuration.grid.data
    of_copy, largest = -(-num_shards // num_copies), -(-batch_size // num_shards)
    return Pipeline(largest, of_copy, num_copies, configuration.order, configuration.shards_update)


class PlannedStep:
    """The costs of a configuration's instructions: `StepCosts` for the clock."""

    def __init__(self, profile: Profile, configuration: Configuration, hardware: Hardware) -> None:
        self.profile, self.configuration, self.hardware_of = profile, configuration, hardware
        self.sizes = [len(shard) for shard in split_into_shards(profile.batch_size, configuration.num_shards)]
        grid = configuration.grid
        self.stages: tuple[LayerCost, ...] = profile.stage_costs(configuration.starts) if grid.network > 1 else ()
        is_whole = not grid.splits_model and not configuration.shards_update  # others are not captured
        self.share = profile.of_whole_step(self.sizes) if is_whole else 1.0  # of what instructions take one by one
        self._slow = [1.0] + [profile.slowed(n, self.sizes[0]) for n in range(1, grid.num_ranks + 1)]

    @property
    def has_processes(self) -> bool:
        """Whether every rank has a process of its own."""
        return self.profile.engine == "processes"

    # --- what the clock asks for ---

    def forward(self, rank: int, shard: int, stage: int) -> float:
        size, speed = self.sizes[shard], self.hardware_of.speed(rank)
        if self.stages:
            return self._layer_share(rank, size) * self.stages[stage].forward.at(size) / speed
        return self.share * self._layer_share(rank, size) * self.profile.whole.at(size) / 3 / speed

    def backward(self, rank: int, shard: int, stage: int) -> float:
        size, speed = self.sizes[shard], self.hardware_of.speed(rank)
        if self.stages:
            return self._layer_share(rank, size) * self.stages[stage].backward.at(size) / speed
        return self.share * self._layer_share(rank, size) * self.profile.whole.at(size) * 2 / 3 / speed

    def add(self, rank: int, num_entries: int) -> float:
        return self.share * self.profile.add * num_entries / self.hardware_of.speed(rank)

    def update(self, rank: int, num_entries: int) -> float:
        return self.share * self.profile.update * num_entries / self.hardware_of.speed(rank)

    def num_bytes(self, value: Value) -> int:
        match value:
            case Activation(shard, stage) | ActivationGradient(shard, stage):
                return int(self.stages[stage].sent_bytes * self.sizes[shard])
        return 4 * len(value.entries)

    def link(self, rank: int, value: Value | None = None) -> Link:
        own = self.profile.cut_link
        is_cut = isinstance(value, (Activation, ActivationGradient))
        return self._link if own is None or not is_cut or self.hardware_of.link is not None else own

    def hardware(self, rank: int) -> Hashable:
        return 0 if self.hardware_of.is_shared else rank

    def slowdown(self, kind: str, num_active: int) -> float:
        return self._slow[min(num_active, len(self._slow) - 1)]

    # --- layers that are split ---

    @cached_property
    def _link(self) -> Link:
        if self.hardware_of.link is not None:
            return self.hardware_of.link
        is_reference = self.profile.device.startswith("cpu") and not self.has_processes
        return self.profile.link._replace(bandwidth=math.inf) if is_reference else self.profile.link

    def _layer_share(self, rank: int, size: int) -> float:
        """A shard's passes on a rank that shares layers, as a share of those of the whole model."""
        number, sliced, profile = self.configuration.grid.layers, self.profile.sliced, self.profile
        if number == 1:
            return 1.0
        assert sliced is not None, "it was measured"
        alone, measured = sliced.alone.at(size), sliced.shared.at(size)
        if self.hardware_of.is_shared and number == 2:
            return measured / profile.slowed(2, size) / profile.whole.at(size)
        waits = sliced.num_gathers * profile.link.latency
        of_two = max(alone / 2, (measured - waits) / profile.slowed(2, size))
        divisible = min(alone, 2 * max(0.0, alone - of_two))
        passes = alone - divisible + divisible / number
        others = 2 * sliced.gathered_bytes * size * (number - 1) / number
        told = sliced.num_gathers * self._link.latency + others / self._link.bandwidth
        return (passes + told * self.hardware_of.speed(rank)) / profile.whole.at(size)

    # --- the step ---

    def shard_ranges(self) -> tuple[range, ...]:
        """The shards of each copy of the model."""
        number, count = self.configuration.grid.data, len(self.sizes)
        if not self.configuration.is_balanced:
            return tuple(split_over_ranks(count, number))
        counts = shares(count, [1 / self.hardware_of.speed(rank) for rank in range(number)])
        starts = [sum(counts[:rank]) for rank in range(number + 1)]
        return tuple(range(starts[rank], starts[rank + 1]) for rank in range(number))

    def schedule(self) -> Schedule:
        """What each rank does."""
        configuration, grid, ranges = self.configuration, self.configuration.grid, self.shard_ranges()
        if not grid.splits_model and not configuration.shards_update:
            entries = range(self.profile.num_entries)
            buckets = bucket_ranges(entries, configuration.bucket_mb, grid.data)
            return data_parallel.__wrapped__(DataParallel(ranges, entries, buckets, configuration.exchange))
        sizes = [stage.num_entries for stage in self.stages] or [self.profile.num_entries]

        def shape(part: int) -> tuple[StageShape, ...]:
            entries = range(sizes[part // grid.layers] // grid.layers)
            owned = tuple(even_ranges(len(entries), grid.data)) if configuration.shards_update else ()
            return (StageShape(part // grid.layers, entries, owned),)

        parts = tuple(map(shape, range(grid.num_parts)))
        split = ModelSplit(grid, tuple(range(grid.network)), parts, configuration.order, gathers_norms=False)
        return combined.__wrapped__(split.step(ranges, configuration.exchange, together=False))

    def clocked(self) -> Clocked:
        """The step on the clock."""
        return run_on_clock(self.schedule(), self)

    def waits_for_samples(self, step: float, busy: float) -> float:
        """Seconds that a step of `step` seconds, in which a rank is busy for so many, waits for samples besides."""
        loading, sizes, grid = self.profile.loading, self.sizes, self.configuration.grid
        if self.has_processes:  # each loads the shards of its copy of the model
            waits = loading.waits(sizes[: -(-len(sizes) // grid.data)], grid.num_ranks, step)
        else:
            waits = loading.waits(sizes, 1, step)
        if loading.num_workers and self.profile.device.startswith("cpu") and self.hardware_of.is_shared:
            work = busy * self.configuration.num_devices + loading.busy * sum(self.sizes)
            waits = max(waits, work / loading.num_cores - step)
        return waits

    # --- memory ---

    @cached_property
    def stage_bytes(self) -> list[int]:
        """What a device with each stage needs: parameters, gradients, the optimizer's state, activations."""
        profile, grid, size = self.profile, self.configuration.grid, self.sizes[0]
        pipeline = pipeline_of(self.configuration, profile.batch_size)
        of_entry = pipeline.bytes_of_entry(profile) / grid.layers
        if not self.stages:
            return [int(profile.num_entries * of_entry + profile.kept_bytes * size)]
        return [
            int(stage.num_entries * of_entry + stage.kept_bytes * size * number)
            for stage, number in zip(self.stages, pipeline.in_flight(grid.network), strict=True)
        ]

    def memory_bytes(self) -> int:
        """What the device with most of it needs."""
        return max(self.stage_bytes)

    def fits(self) -> bool:
        """Whether every device has the memory for its part."""
        grid, hardware = self.configuration.grid, self.hardware_of
        limits = [math.inf] * grid.network
        for rank in range(grid.num_ranks):
            place = grid.at(rank).network
            limits[place] = min(limits[place], hardware.memory(rank, grid.num_ranks))
        return all(needed <= limit for needed, limit in zip(self.stage_bytes, limits, strict=True))


class Predicted(NamedTuple):
    """What the clock says about a configuration."""

    seconds: float
    parts: dict[str, float]  # compute, exchange, bubble, loading, launch: seconds of an average device

    is_loading_ahead: bool = False

    @property
    def limited_by(self) -> str:
        """The largest part; or loading, wherever a step waits for what is loaded while it computes."""
        if self.is_loading_ahead and self.parts[LOADING] > MIN_WAIT * self.seconds:
            return LOADING
        return max(self.parts, key=lambda name: self.parts[name])


def predict(profile: Profile, configuration: Configuration, hardware: Hardware) -> Predicted:
    """The time of a step, and where it goes."""
    step = PlannedStep(profile, configuration, hardware)
    num_passes = len(step.sizes) * configuration.grid.num_parts
    if configuration.num_devices > MAX_ON_CLOCK or num_passes > MAX_PASSES_ON_CLOCK:
        from lockstep.analysis.large import large_step

        seconds, totals = large_step(step)
    else:
        clocked = step.clocked()
        seconds, totals = clocked.seconds, clocked.totals()
    host = step.share * profile.step.at(configuration.num_devices if hardware.is_shared else 1)
    shards = -(-len(step.sizes) // configuration.grid.data)
    busy = totals.get(FORWARD, 0.0) + totals.get(BACKWARD, 0.0)
    launch = min(busy, step.share * profile.whole.fixed * shards / configuration.grid.num_parts / hardware.speed(0))
    compute = busy - launch + totals.get(ADD, 0.0) + totals.get(UPDATE, 0.0)
    found = {COMPUTE: compute, EXCHANGE: totals.get(EXCHANGE, 0.0), BUBBLE: totals.get(BUBBLE, 0.0)}
    found[LAUNCH] = launch + host
    times, grid = 1.0, configuration.grid
    if hardware.is_shared:
        times = profile.correction(grid.num_ranks, grid.kind, configuration.num_shards)
    total = times * (seconds + host)
    loading = step.waits_for_samples(total, times * busy)
    parts = {name: times * part for name, part in found.items()} | {LOADING: loading}
    return Predicted(total + loading, parts, is_loading_ahead=profile.loading.num_workers > 0)
