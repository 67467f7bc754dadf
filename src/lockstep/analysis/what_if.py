"""Hardware that is not there, as it is written: `--link 25GB/s,10us --device-speed 1,0.5 --device-memory 80GB`."""

import math
import re

from lockstep.core.errors import ConfigError
from lockstep.schedules.clock import Link

BANDWIDTHS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
PER_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}
MEMORY = re.compile(r"([0-9.eE+-]+?)\s*([kmgt]?)(i?)b", re.IGNORECASE)
LINK = re.compile(r"([0-9.eE+-]+?)\s*([kmgt]?)(b|B|bit)/s(?:\s*,\s*([0-9.eE+-]+?)\s*(ns|us|µs|ms|s))?", re.IGNORECASE)


def parse_link(text: str) -> Link:
    """A link of so many bytes a second, and so many seconds until a message is there.

    >>> parse_link("25GB/s,10us")
    Link(latency=1e-05, bandwidth=25000000000.0)
    >>> parse_link("100Gbit/s").bandwidth
    12500000000.0
    """
    found = LINK.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError(text)
        amount, scale, unit, delay, of_delay = found.groups()
        bandwidth = float(amount) * BANDWIDTHS[scale.lower()] / (8 if unit.lower() == "bit" else 1)
        latency = float(delay) / PER_SECOND[of_delay.lower()] if delay else 0.0
    except ValueError:
        raise ConfigError(
            f"--link {text} cannot be read. Write bytes a second, and the latency: --link 25GB/s,10us."
        ) from None
    if not 0 < bandwidth < math.inf or not 0 <= latency < math.inf:
        raise ConfigError(
            f"--link {text} is no link: the bandwidth must be more than 0, and the latency at least 0. Write, for "
            f"example, --link 25GB/s,10us."
        )
    return Link(latency, bandwidth)


def parse_memories(text: str, max_devices: int) -> tuple[float, ...]:
    """The memory of all devices in bytes; one number is for all.

    >>> parse_memories("80GB,512MiB", 2)
    (80000000000.0, 536870912.0)
    """
    found = [MEMORY.fullmatch(part.strip()) for part in text.split(",")]
    try:
        memories = tuple(_bytes(*part.groups()) for part in found if part is not None)
        if len(memories) < len(found):
            raise ValueError(text)
    except ValueError:
        raise ConfigError(
            f"--device-memory {text} cannot be read. Write bytes of each device, or of all: --device-memory 80GB."
        ) from None
    if not all(0 < memory < math.inf for memory in memories):
        raise ConfigError(f"The memory of a device must be more than 0, got --device-memory {text}.")
    _check_number(len(memories), "--device-memory", max_devices)
    return memories


def _bytes(amount: str, scale: str, binary: str) -> float:
    base = 1024.0 if binary else 1000.0
    return float(amount) * base ** " kmgt".index(scale.lower() or " ")


def parse_speeds(text: str, max_devices: int) -> tuple[float, ...]:
    """The speeds of all devices, as multiples of the one that is measured; one number is for all.

    >>> parse_speeds("1,0.5", 2)
    (1.0, 0.5)
    """
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--device-speed {text} cannot be read. Write a number for each device, or one for all, as multiples of "
            f"the device at hand: --device-speed 1,0.5."
        ) from None
    for speed in speeds:
        if not 0 < speed < math.inf:
            raise ConfigError(f"A device speed must be more than 0 and finite, got {speed:g} (--device-speed {text}).")
    _check_number(len(speeds), "--device-speed", max_devices)
    return speeds


def _check_number(number: int, option: str, max_devices: int) -> None:
    if number not in (1, max_devices):
        raise ConfigError(
            f"{option} has {number} numbers, and the plan is for up to {max_devices} "
            f"device{'s' * (max_devices > 1)}. Give one number for all, or {max_devices} of them (--max-devices)."
        )
