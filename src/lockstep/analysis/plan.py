"""What k devices will bring: every configuration on the clock, one of them recommended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.analysis.candidates import configurations, device_numbers
from lockstep.analysis.command import command_of
from lockstep.analysis.cost import Log, Wanted, measure
from lockstep.analysis.device_order import OtherOrder, fastest_order
from lockstep.analysis.profile import Profile
from lockstep.analysis.step_costs import LOADING, Configuration, Hardware, PlannedStep, predict
from lockstep.analysis.what_if import parse_link, parse_memories, parse_speeds
from lockstep.backends import devices_for, load_backend
from lockstep.config import MAX_SHARDS, RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.core.torchrun_env import torchrun_env
from lockstep.partition.grid import AUTO, SPLITS, parse_split
from lockstep.report.console import fetch_progress, size
from lockstep.training.auto_split import memory_limit
from lockstep.training.setup import find_data, prepare, with_engine
from lockstep.training.task import UserObjects

MEMORY = "memory"  # what limits a configuration that does not fit
DEFAULT_SHARDS = (1, 2, 4, 8, 16)
MAX_DEVICES = 65_536
MIN_GAIN = 0.05  # of the step, that another device has to bring; measurements are no better than that
MIN_SHARDS_GAIN = 0.10  # that another number of shards has to bring before it is mentioned: it changes the weights


class PlanRow(NamedTuple):
    """A configuration, and what is known about it."""

    configuration: Configuration
    split: str
    predicted_ms: float
    speedup: float  # against one device with the same number of shards
    memory_bytes: int
    limited_by: str
    parts_ms: dict[str, float]
    command: str
    is_same_run: bool  # the weights are those of the settings that were given
    measured_ms: float | None = None
    error: float | None = None  # predicted against measured, as a share of the measured time

    @property
    def fits(self) -> bool:
        """Whether the devices have the memory for it."""
        return self.limited_by != MEMORY

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        found = {
            "devices": self.configuration.num_devices,
            "split": self.split,
            "shards": self.configuration.num_shards,
            "predicted_ms": round(self.predicted_ms, 4),
            "memory_bytes": self.memory_bytes,
            "limited_by": self.limited_by,
            "command": self.command,
        }
        if self.measured_ms is not None and self.error is not None:
            found |= {"measured_ms": round(self.measured_ms, 4), "error": round(self.error, 4)}
        return found


@dataclass(frozen=True)
class Plan:
    """A plan: rows by number of devices, the one that is recommended, and sentences about it."""

    rows: tuple[PlanRow, ...]
    recommended: PlanRow
    notes: tuple[str, ...]
    title: str
    profile: Profile

    def plain(self) -> dict[str, Any]:
        """As `lockstep plan --json` prints it."""
        return {"configurations": [row.plain() for row in self.rows], "recommended": self.recommended.plain()}

    def __str__(self) -> str:
        from lockstep.analysis.plan_table import as_text

        return as_text(self)


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is asked for, besides the settings of the run."""

    max_devices: int | None = None  # None: those at hand
    shards: str | None = None  # like 4,8; None: the usual ones, and the run's own
    link: str | None = None
    device_speed: str | None = None
    device_memory: str | None = None
    splits: tuple[str, ...] | None = None  # ways of splitting, all of which have to be possible; None: those that are
    seconds: float = 40.0  # to measure for, about


def make_plan(
    config: RunConfig, objects: UserObjects | None, options: PlanOptions, log: Log
) -> tuple[Plan, UserObjects]:
    """Measures, and puts every configuration on the clock; also the user's objects, with the data that was loaded."""
    if torchrun_env():
        raise ConfigError("lockstep plan measures the devices of one machine. Leave torchrun out.")
    if not _is_number(options.seconds) or not 0 <= options.seconds < math.inf:
        raise ConfigError(f"The time to measure for must be at least 0 and finite, got {options.seconds} (--seconds).")
    engine = with_engine(config).engine  # before a GPU is used, after which no process can be forked
    at_hand = devices_for(load_backend(config.backend), config.devices)
    max_devices = _max_devices(options.max_devices, len(at_hand))
    hardware = hardware_of(options, max_devices, at_hand)
    shards = shard_numbers(options.shards, config)
    with fetch_progress() as progress:
        data = find_data(config, objects or UserObjects(), progress)
    loaded = replace(objects or UserObjects(), data=data)
    prepare(replace(config, devices=str(at_hand[0]), split="data", stages=None), loaded)  # refuses what a run would
    splits = SPLITS if options.splits is None else options.splits
    profile = measure(config, loaded, Wanted(max_devices, shards, splits, options.seconds, engine), log)
    for split, problem in profile.problems.items() if options.splits is not None else ():
        raise ConfigError(f"--split {split} cannot be planned: {problem}.")
    return plan_of(config, profile, hardware, PlanInput(max_devices, shards, objects is not None)), loaded


class PlanInput(NamedTuple):
    """What the rows of a plan are made from."""

    max_devices: int
    shards: tuple[int, ...]
    is_python: bool = False  # it was asked for in Python, with objects that no command can name


def plan_of(config: RunConfig, profile: Profile, hardware: Hardware, asked: PlanInput) -> Plan:
    """The rows of a plan, and which is best."""
    rows, alone = list[PlanRow](), dict[int, float]()
    reasons = {number: profile.left_out.get(-(-config.batch_size // number)) for number in asked.shards}
    shards = [number for number, reason in reasons.items() if reason is None]
    found = configurations(profile, config, device_numbers(asked.max_devices), shards, hardware)
    for one in sorted(found, key=lambda c: (c.num_devices, c.grid != c.grid._replace(network=1, layers=1))):
        predicted, step = predict(profile, one, hardware), PlannedStep(profile, one, hardware)
        if one.num_devices == 1:
            alone[one.num_shards] = predicted.seconds
        rows.append(
            PlanRow(
                configuration=one,
                split=split_of(one),
                predicted_ms=1e3 * predicted.seconds,
                speedup=alone.get(one.num_shards, predicted.seconds) / predicted.seconds,
                memory_bytes=step.memory_bytes(),
                limited_by=predicted.limited_by if step.fits() else MEMORY,
                parts_ms={name: 1e3 * seconds for name, seconds in predicted.parts.items()},
                command=command_of(config, one, asked.is_python),
                is_same_run=one.num_shards == config.num_shards and (one.grid.layers == 1 or bool(config.num_slices)),
            )
        )
    if config.stages is not None and not any(row.configuration.starts for row in rows):
        names = ", ".join(layer.name for layer in profile.layers[1:]) or "none"
        raise ConfigError(
            f"--stages {config.stages} cannot be planned for up to {asked.max_devices} devices. Layers that a stage "
            f"can begin with: {names}."
        )
    if not rows:
        raise ConfigError(f"There is no configuration for these settings: {config.split} cannot be planned.")
    own = [row.configuration for row in rows if row.is_same_run and config.stages is None]
    best, notes = recommended(rows, fastest_order(profile, own, hardware))
    what = f"{config.model}, batch {config.batch_size}, measured on {profile.device}"
    if profile.engine == "processes":
        what += ", engine processes"
        notes.append(f"Processes take about {profile.start:.1f} s to start.")
    if best.limited_by == LOADING:
        notes.append(profile.loading.sentence())
    for split, problem in profile.problems.items():
        notes.append(f"--split {split} is left out: {problem}.")
    notes += [f"--shards {number} is left out: {reason}." for number, reason in reasons.items() if reason is not None]
    return Plan(tuple(rows), best, tuple(notes), what, profile)


def recommended(rows: Sequence[PlanRow], other_order: OtherOrder | None = None) -> tuple[PlanRow, list[str]]:
    """The fastest row with the weights of the run as it is; fewer devices where more bring nothing. And why."""
    fit = [row for row in rows if row.fits]
    if not fit:
        raise ConfigError(nothing_fits(rows, other_order))
    own = [row for row in fit if row.is_same_run] or fit
    fastest = min(own, key=lambda row: row.predicted_ms)
    within = [row for row in own if row.predicted_ms * (1 - MIN_GAIN) <= fastest.predicted_ms]
    best = min(within, key=lambda row: (row.configuration.num_devices, row.predicted_ms))
    notes = list[str]()
    if best.configuration.num_devices == 1:
        notes.append("one device is best")
    if not best.is_same_run:
        notes.append("It gives other weights: nothing that keeps them fits into the memory of the devices.")
    if other_order is not None and other_order.milliseconds < (1 - MIN_GAIN) * best.predicted_ms:
        notes.append(other_order.sentence())
    other = min(fit, key=lambda row: row.predicted_ms)
    if other.predicted_ms < (1 - MIN_SHARDS_GAIN) * best.predicted_ms:
        what = f"--shards {other.configuration.num_shards}"
        if other.configuration.grid.layers > 1:
            what += " with layers in slices"
        notes.append(
            f"{what} would take {other.predicted_ms:,.1f} ms instead of {best.predicted_ms:,.1f}, and give other "
            f"weights:\n  {other.command}"
        )
    return best, notes


def nothing_fits(rows: Sequence[PlanRow], other_order: OtherOrder | None = None) -> str:
    """The sentence about devices that are too small for all of it."""
    if other_order is not None:
        return f"Nothing fits into the memory of the devices as they are listed. {other_order.sentence()}"
    least = min(rows, key=lambda row: row.memory_bytes)
    configuration = least.configuration
    devices = f"{configuration.num_devices} device{'s' * (configuration.num_devices > 1)}"
    return (
        f"Nothing fits into the memory of the devices: the least that one needs is {size(least.memory_bytes)}, with "
        f"{devices}, --split {least.split} and --shards {configuration.num_shards}. Look at more devices "
        f"(--max-devices), more shards (--shards), a smaller batch, or devices with more memory (--device-memory)."
    )


def split_of(configuration: Configuration) -> str:
    """As `--split` has it."""
    grid = configuration.grid
    named = [name for name, number in grid._asdict().items() if number > 1]
    return (named or ["data"])[0] if len(named) < 2 else str(grid)


def own_shards(text: str | None) -> dict[str, int]:
    """The run's own number of shards, of those that a plan looks at: the first."""
    first = (text or "").partition(",")[0].strip()
    return {"num_shards": int(first)} if first.isdecimal() else {}


def splits_in(split: str | None) -> tuple[str, ...] | None:
    """The ways of splitting that a plan looks at, where a `--split` was given.

    >>> splits_in("data=2,network=2")
    ('data', 'network')
    """
    return None if split in (None, AUTO) else tuple(parse_split(split))


def shard_numbers(text: str | None, config: RunConfig) -> tuple[int, ...]:
    """The numbers of shards that are looked at: those that fit into a batch."""
    if text is None:
        return tuple(sorted(n for n in {*DEFAULT_SHARDS, config.num_shards} if n <= max(1, config.batch_size)))
    numbers = list[int]()
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= min(MAX_SHARDS, config.batch_size):
            raise ConfigError(
                f"--shards {text} cannot be planned at {part!r}: use numbers from 1 to the batch size, "
                f"{min(MAX_SHARDS, config.batch_size)}, like --shards 4,8."
            )
        numbers.append(int(part))
    return tuple(sorted(set(numbers)))


def hardware_of(options: PlanOptions, max_devices: int, at_hand: list[Device]) -> Hardware:
    """The devices of a plan: those at hand, or others that were described."""
    speeds = (1.0,) if options.device_speed is None else parse_speeds(options.device_speed, max_devices)
    link = None if options.link is None else parse_link(options.link)
    is_described, is_cpu = link is not None or options.device_speed is not None, at_hand[0].kind == "cpu"
    hardware = Hardware(speeds, link, is_shared=not is_described and (is_cpu or len(at_hand) == 1))
    if options.device_memory is not None:
        return hardware._replace(memories=parse_memories(options.device_memory, max_devices))
    if hardware.is_shared:
        return hardware._replace(shared_memory=memory_limit(at_hand[:1]))
    return hardware._replace(memories=(memory_limit(at_hand[:1] if is_cpu else at_hand),))


def _max_devices(wanted: int | None, num_at_hand: int) -> int:
    if wanted is None:
        return num_at_hand
    if not _is_number(wanted) or wanted != int(wanted) or not 1 <= wanted <= MAX_DEVICES:
        raise ConfigError(f"The number of devices must be from 1 to {MAX_DEVICES}, got {wanted} (--max-devices).")
    return int(wanted)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
