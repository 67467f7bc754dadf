"""File-system calls of a run that fail: every call below a folder is counted, in all processes, and one can fail.

Calls are those of the C library (`file_faults.c`, compiled here and preloaded), so that nothing goes past them: Python,
its extensions and libraries in other languages all make them there.
"""

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
MAX_CALLS = 4096


class _Call(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 16), ("path", ctypes.c_char * 112))


class _State(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("count", "fails", "error", "full", "num_failed")),
        ("calls", _Call * MAX_CALLS),
    )


def preload() -> None:
    """Starts this program again with the calls in place, unless they are."""
    if hasattr(ctypes.CDLL(None), "file_faults_begin"):
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("A C compiler is needed to make file-system calls fail: install gcc.")
    library = Path(tempfile.mkdtemp(prefix="lockstep-faults-"), "file_faults.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def forget_library() -> None:
    """Removes the compiled library: it is loaded, and later processes are forked."""
    library = Path(os.environ.pop("LD_PRELOAD"))
    shutil.rmtree(library.parent, ignore_errors=True)


class FileFaults:
    """Calls below `folder`: number `fails` gets `error`, or SIGKILL where it is 0. Shared with forked processes."""

    def __init__(self, folder: Path, fails: int = 0, error: int = 0) -> None:
        self._folder = folder
        self._memory = mmap.mmap(-1, ctypes.sizeof(_State))
        self._state = _State.from_buffer(self._memory)
        self._state.fails, self._state.error = fails, error

    def begin(self) -> None:
        """From now on, in this process and those it forks."""
        ctypes.CDLL(None).file_faults_begin(os.fsencode(self._folder), ctypes.byref(self._state))

    def fail(self, after: int, error: int) -> None:
        """The call that comes after so many more."""
        self._state.error, self._state.fails = error, self.count + after

    def set_full(self, is_full: bool) -> None:
        """Whether the disk is full."""
        self._state.full = is_full

    @property
    def num_failed(self) -> int:
        """Calls that have failed so far."""
        return int(self._state.num_failed)

    @property
    def count(self) -> int:
        """Calls so far."""
        return int(self._state.count)

    def calls(self) -> list[str]:
        """What they were: name and path, the first one first."""
        return [
            f"{call.name.decode()} {os.fsdecode(call.path)}"
            for call in self._state.calls[1 : min(self.count + 1, MAX_CALLS)]
        ]
