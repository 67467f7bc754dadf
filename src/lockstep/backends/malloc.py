"""glibc's malloc keeps the memory that a shard frees for the next one, which saves a page fault for each 4 kB.

The settings cannot be read, so afterwards they are those of the environment, or else glibc's defaults. (glibc's dynamic
mmap threshold stays off once any of them was set.)
"""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

MB = 1 << 20


class Setting(NamedTuple):
    """A parameter of mallopt."""

    number: int
    name: str  # in GLIBC_TUNABLES; MALLOC_NAME_ in the environment
    ours: int
    default: int


SETTINGS = (
    Setting(-3, "mmap_threshold", 32 * MB, 128 * 1024),
    Setting(-1, "trim_threshold", 512 * MB, 128 * 1024),
    # more than the 64 MB of a thread's heap: else one that is free goes back to the system, and the next shard faults
    # its pages in again (2 devices with 128 samples of the transformer each: 300 ms a step, and 315 with 16 MB)
    Setting(-2, "top_pad", 72 * MB, 0),
)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within it, this process keeps the memory it frees; has no effect with a C library without mallopt."""
    for setting in SETTINGS:
        _mallopt(setting.number, setting.ours)
    try:
        yield
    finally:
        for setting in SETTINGS:
            _mallopt(setting.number, value_before(setting))


def value_before(setting: Setting) -> int:
    """What the environment sets, or glibc's default."""
    tunable = re.search(rf"glibc\.malloc\.{setting.name}=(\w+)", os.environ.get("GLIBC_TUNABLES", ""))
    found = tunable[1] if tunable else os.environ.get(f"MALLOC_{setting.name.upper()}_", "")
    try:
        return int(found, 0)
    except ValueError:
        return setting.default


def _mallopt(number: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(number, value)
