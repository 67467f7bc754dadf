"""A fault at every call: a short run is repeated, and each of its file-system calls fails once, or is its last.

    python benchmarks/faults.py --engine inprocess

Counts the calls (open, write, fsync, rename, unlink, mkdir) of a run with checkpoints, then for each of them, and for
each kind of fault (SIGKILL at the call, after half of a write; EIO; ENOSPC), runs it once more with that fault and
resumes it. Every run has to end with the same hash, or with a sentence, and then with the same hash when it is resumed.
"""

import argparse
import contextlib
import errno
import io
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from lockstep.core.errors import LockstepError

FAULTS = {"kill": 0, "EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


class Faults:
    """Counts the calls below a folder, in this process and those it forks; the one with a number fails."""

    def __init__(self, folder: Path, number: int = 0, fault: str = "kill") -> None:
        self._folder, self._number, self._fault = str(folder), number, fault
        self._count = os.memfd_create("count")  # common to all processes

    @property
    def count(self) -> int:
        """Calls so far."""
        return os.fstat(self._count).st_size

    def install(self) -> None:
        """From now on, in this process and those it forks; it cannot be undone."""
        sys.addaudithook(self._on_event)
        fsync, write_bytes = os.fsync, Path.write_bytes

        def own_fsync(descriptor: int) -> None:
            self._call()
            fsync(descriptor)

        def own_write(path: Path, content: bytes) -> int:
            if str(path).startswith(self._folder) and self._is_next():
                write_bytes(path, content[: len(content) // 2])  # a torn write
                self._fail()
            return write_bytes(path, content)

        os.fsync, Path.write_bytes = own_fsync, own_write  # type: ignore[method-assign]
        Path.write_text = lambda path, text, **how: own_write(path, text.encode())  # type: ignore[method-assign]

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and any(str(each).startswith(self._folder) for each in arguments[:2]):
            self._call()

    def _is_next(self) -> bool:
        os.write(self._count, b".")
        return self.count == self._number

    def _call(self) -> None:
        if self._is_next():
            self._fail()

    def _fail(self) -> None:
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(FAULTS[self._fault], os.strerror(FAULTS[self._fault]))


def run(out: Path, data: Any, engine: str, faults: Faults | None, resume: bool) -> tuple[int, str, int]:
    """Exit status, the hash or what was said, and the calls, of a run in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)
        status, said = 3, "an exception"
        try:
            sys.stderr = io.StringIO()
            if faults is not None:
                faults.install()
            how = {"batch_size": 6, "num_epochs": 2, "lr": 0.05, "checkpoint_every": 2, "keep_checkpoints": 2}
            backend = {"backend": "numpy"} if engine == "inprocess" else {"engine": "processes"}
            result = lockstep.train(2, data=data, out=out, resume=resume, quiet=True, shards=2, **how, **backend)
            status, said = 0, result.weights_sha256
        except LockstepError as problem:
            status, said = 1, str(problem)
        except BaseException as problem:
            said = repr(problem)
        finally:
            os.write(writer, said.encode()[:4000])
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status), said, 0 if faults is None else faults.count


def main() -> int:
    """Prints what was found; the number of runs that did not end as they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["inprocess", "processes"], default="inprocess")
    parser.add_argument("--every", type=int, default=1, help="only every n-th call")
    options = parser.parse_args()
    draw = np.random.RandomState(0)
    images = draw.randint(0, 256, (24, 1, 28, 28)).astype(np.uint8)
    data = (images, draw.randint(0, 10, 24)), (images[:6], draw.randint(0, 10, 6))
    wrong, outcomes = [], {"same hash at once": 0, "a sentence, then the same hash": 0, "killed, then the same hash": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        status, expected, num_calls = run(folder / "whole", data, options.engine, Faults(folder), resume=False)
        assert status == 0, expected
        for number in range(1, num_calls + 1, options.every):
            for fault in FAULTS:
                out = folder / f"{fault}-{number}"
                status, said, _ = run(out, data, options.engine, Faults(out, number, fault), resume=False)
                if (status, said) == (0, expected):
                    outcomes["same hash at once"] += 1
                    continue
                again = run(out, data, options.engine, None, resume=True)
                if status in (1, -signal.SIGKILL) and again[:2] == (0, expected):
                    key = "killed, then the same hash" if status < 0 else "a sentence, then the same hash"
                    outcomes[key] += 1
                else:
                    wrong.append({"call": number, "fault": fault, "status": status, "said": said, "resumed": again[:2]})
    print(json.dumps({"engine": options.engine, "calls": num_calls, **outcomes, "wrong": wrong}, indent=2))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(bool(main()))
