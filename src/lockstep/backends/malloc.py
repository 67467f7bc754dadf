"""Memory that a shard frees is kept for the next one: giving it back and getting it again is a page fault for each 4 kB.

Set for glibc's malloc, and put back to what the environment says, or else to glibc's defaults: it cannot be asked what
it was. (glibc's own adjustment of the mmap threshold stays off once any of these was set.)
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
    """One of mallopt's parameters."""

    number: int
    name: str  # in GLIBC_TUNABLES; MALLOC_NAME_ in the environment
    ours: int
    default: int


SETTINGS = (
    Setting(-3, "mmap_threshold", 32 * MB, 128 * 1024),
    Setting(-1, "trim_threshold", 512 * MB, 128 * 1024),
    Setting(-2, "top_pad", 16 * MB, 0),
)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """While it is entered, memory that is freed stays with this process, as far as its C library can be asked for it."""
    for setting in SETTINGS:
        _mallopt(setting.number, setting.ours)
    try:
        yield
    finally:
        for setting in SETTINGS:
            _mallopt(setting.number, value_before(setting))


def value_before(setting: Setting) -> int:
    """What the environment sets it to, or glibc's default."""
    tunable = re.search(rf"glibc\.malloc\.{setting.name}=(\w+)", os.environ.get("GLIBC_TUNABLES", ""))
    found = tunable[1] if tunable else os.environ.get(f"MALLOC_{setting.name.upper()}_", "")
    try:
        return int(found, 0)
    except ValueError:
        return setting.default


def _mallopt(number: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(number, value)
