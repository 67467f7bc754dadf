"""One attempt of a run of the soak: a command in a forked process, and who belongs to it."""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from file_faults import FileFaults
from soak_faults import Flips


def children_of(process: int) -> list[int]:
    """The processes that it has started."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def members_of(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            state, _, _, its_session = place.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(place.parent.name))
    return found


@dataclass
class Command:
    """`lockstep train ARGUMENTS` in a forked process: one attempt of a run."""

    folder: Path
    arguments: list[str]
    output: Path  # what it prints goes to .out and .err
    faults: FileFaults = field(init=False)
    flips: Flips = field(init=False)
    process: int = field(init=False)
    status: int | None = None

    def __post_init__(self) -> None:
        self.faults, self.flips = FileFaults(self.folder), Flips()
        for suffix in (".out", ".err"):
            self.output.with_suffix(suffix).write_text("")  # it may be killed before it has opened them
        parent, self.process = os.getpid(), os.fork()
        if self.process == 0:
            self._become(parent)

    @property
    def num_devices(self) -> int:
        """k."""
        return int(self.arguments[self.arguments.index("--devices") + 1])

    def workers(self) -> list[int]:
        """The worker processes that are alive."""
        return children_of(self.process)

    def is_over(self) -> bool:
        """Whether it has ended."""
        if self.status is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if ended else None
        return self.status is not None

    def wait(self, seconds: float) -> bool:
        """Whether it has ended before the time is out."""
        deadline = time.monotonic() + seconds
        while not self.is_over() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.is_over()

    def _become(self, parent: int) -> None:
        from lockstep.cli import main
        from lockstep.core.child_process import die_with

        os.setsid()
        die_with(parent)
        for suffix, descriptor in ((".out", 1), (".err", 2)):
            os.dup2(os.open(self.output.with_suffix(suffix), os.O_WRONLY | os.O_APPEND), descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.register(signal.SIGQUIT, all_threads=True)  # where it hangs, if it does
        status = 1
        try:
            self.flips.install()
            self.faults.begin()
            main(["train", *self.arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
