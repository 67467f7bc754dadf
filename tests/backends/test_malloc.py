"""glibc's malloc during a session and after it: which blocks are mmapped, and whether freed memory is kept."""

import ctypes
import os
import subprocess
import sys

import pytest

from lockstep.backends import is_installed
from lockstep.backends.malloc import SETTINGS, Setting, value_before

# Free chunks of the heap serve a block before mmap does, so `is_mmapped` looks at the last of many blocks.
PROGRAM = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
libc.mallinfo2.restype = MallInfo

def is_mmapped(num_mb):
    for _ in range(96 // num_mb):
        before = libc.mallinfo2().hblks
        libc.malloc(ctypes.c_size_t(num_mb << 20))
    return libc.mallinfo2().hblks > before

def keeps_freed_memory():
    for block in reversed([libc.malloc(ctypes.c_size_t(100_000)) for _ in range(200)]):
        libc.free(block)
    return libc.mallinfo2().keepcost > 1 << 20  # bytes at the top of the heap

def show():
    print([num_mb for num_mb in (1, 8) if is_mmapped(num_mb)], keeps_freed_memory())
"""
CONTEXT = """
from lockstep.backends.malloc import freed_memory_kept
context = freed_memory_kept()
"""
SESSION = """
from lockstep.backends import load_backend
from lockstep.core.device import Device
context = load_backend("torch").session([Device("cpu:0")])
"""
USE = """
with context:
    show()
show()
"""
USE_WITH_ERROR = """
try:
    with context:
        show()
        raise ZeroDivisionError
except ZeroDivisionError:
    show()
"""

needs_mallinfo2 = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or newer: no mallinfo2"
)


def inside_and_after(code, **environment):
    """The sizes in MB of mmapped blocks, and whether freed memory is kept: inside the context, and after it."""
    inherited = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES" and not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@needs_mallinfo2
@pytest.mark.parametrize("use", [USE, USE_WITH_ERROR], ids=["no error", "error"])
def test_freed_memory_is_kept_inside_and_all_settings_are_restored_afterwards(use):
    assert inside_and_after(CONTEXT + use) == ["[] True", "[1, 8] False"]


@needs_mallinfo2
@pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed")
def test_a_torch_session_keeps_freed_memory_and_restores_all_settings():
    assert inside_and_after(SESSION + USE) == ["[] True", "[1, 8] False"]


@needs_mallinfo2
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_MMAP_THRESHOLD_": str(4 << 20)}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=0x400000"}],
    ids=lambda environment: next(iter(environment)),
)
def test_the_mmap_threshold_of_the_environment_is_restored(environment):
    assert inside_and_after(CONTEXT + USE, **environment) == ["[] True", "[8] False"]


THRESHOLD, TRIM, PAD = SETTINGS


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (131072, 131072, 0)),
        ({"MALLOC_MMAP_THRESHOLD_": "5000"}, (5000, 131072, 0)),
        ({"MALLOC_TRIM_THRESHOLD_": "0x2000", "MALLOC_TOP_PAD_": "7"}, (131072, 8192, 7)),
        ({"GLIBC_TUNABLES": "glibc.malloc.top_pad=64:glibc.malloc.mmap_threshold=0x100"}, (256, 131072, 64)),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=3", "MALLOC_TOP_PAD_": "9"}, (131072, 131072, 9)),
        ({"MALLOC_MMAP_THRESHOLD_": "", "MALLOC_TRIM_THRESHOLD_": "many"}, (131072, 131072, 0)),
    ],
)
def test_the_value_before_is_that_of_the_environment_or_the_default(monkeypatch, environment, expected):
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tuple(map(value_before, SETTINGS)) == expected


def test_the_settings_are_those_of_glibcs_header():
    """M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of malloc.h."""
    assert [(setting.name, setting.number) for setting in (TRIM, PAD, THRESHOLD)] == [
        ("trim_threshold", -1),
        ("top_pad", -2),
        ("mmap_threshold", -3),
    ]
    assert all(isinstance(setting, Setting) and setting.ours > setting.default for setting in SETTINGS)
