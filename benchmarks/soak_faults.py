"""What the soak does to a run: each fault is a function of the attempt that is under way; True if it was reached."""

import mmap
import os
import random
import re
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from file_faults import FileFaults

EIO, FOUND_SECONDS = 5, 60.0


class NotFound(AssertionError):
    """A flipped bit that nobody has noticed."""


class Flips:
    """A bit of one rank's weights, flipped after an update; armed from outside, in memory that is shared."""

    FORMAT = struct.Struct(
        "4q"
    )  # the process that is to flip, its rank in that process, the bit, how many were flipped

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.FORMAT.size)

    @property
    def count(self) -> int:
        """Bits that were flipped so far."""
        return int(self.FORMAT.unpack(self._memory[:])[3])

    def arm(self, process: int, rank: int, bit: int) -> None:
        """The next update of this rank's thread; a worker process has only one."""
        self._memory[:] = self.FORMAT.pack(process, rank, bit, self.count)

    def install(self) -> None:
        """In this process and those it forks."""
        import torch

        from lockstep.core.this_thread import THIS_THREAD
        from lockstep.replicas.flat import FlatReplica
        from lockstep.replicas.module import ModuleReplica

        def flipping(update: Callable[..., None], weights_of: Callable[[Any], Any]) -> Callable[..., None]:
            def updated(replica: Any, *arguments: Any) -> None:
                update(replica, *arguments)
                process, rank, bit, count = self.FORMAT.unpack(self._memory[:])
                if (process, rank) == (os.getpid(), THIS_THREAD.rank):
                    self._memory[:] = self.FORMAT.pack(0, 0, 0, count + 1)
                    weights_of(replica).data.flatten().view(torch.int32)[7] ^= 1 << bit

            return updated

        for kind, weights_of in (
            (FlatReplica, lambda replica: replica.flat),
            (ModuleReplica, lambda replica: list(replica.module.parameters())[-1]),
        ):
            kind.update = flipping(kind.update, weights_of)  # type: ignore[method-assign]


class Attempt(Protocol):
    """A command of a run that is under way."""

    process: int
    output: Path  # what it prints goes to .err
    folder: Path  # of the run
    num_devices: int
    faults: FileFaults
    flips: Flips

    def workers(self) -> list[int]: ...
    def is_over(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...


def send(process: int, number: int) -> bool:
    """Whether there was somebody to send the signal to: one that has ended, and is not yet waited for, is nobody."""
    try:
        is_alive = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        os.kill(process, number)
    except (OSError, IndexError):
        return False
    return is_alive


def kill_all(attempt: Attempt, draw: random.Random) -> bool:
    """SIGKILL to all processes, in any order."""
    processes = [attempt.process, *attempt.workers()]
    draw.shuffle(processes)
    found = [process for process in processes if send(process, signal.SIGKILL)]
    attempt.wait(10.0)
    return bool(found)


def kill_main(attempt: Attempt, draw: random.Random) -> bool:
    """SIGKILL to the process that the user started."""
    found = send(attempt.process, signal.SIGKILL)
    attempt.wait(10.0)
    return found


def kill_worker(attempt: Attempt, draw: random.Random) -> bool:
    """SIGKILL to one worker process."""
    workers = attempt.workers()
    return bool(workers) and send(draw.choice(workers), signal.SIGKILL)


def interrupt(attempt: Attempt, draw: random.Random) -> bool:
    """Ctrl-C or SIGTERM, to one process or to all; now and then twice."""
    number = draw.choice([signal.SIGINT, signal.SIGTERM])
    processes = [attempt.process, *(attempt.workers() if draw.random() < 0.5 else [])]
    found = [send(process, number) for process in processes]
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0.0, 0.3))
        send(attempt.process, number)
    return any(found)


def stop_for_a_while(attempt: Attempt, draw: random.Random) -> bool:
    """SIGSTOP to one process or to all, and SIGCONT."""
    processes = [attempt.process, *attempt.workers()]
    chosen = [draw.choice(processes)] if draw.random() < 0.7 else processes
    found = [send(process, signal.SIGSTOP) for process in chosen]
    time.sleep(draw.uniform(0.05, 0.8))
    for process in chosen:
        send(process, signal.SIGCONT)
    return any(found)


def stop_for_good(attempt: Attempt, draw: random.Random) -> bool:
    """SIGSTOP to one worker process, or to all, which are never continued: they are dropped when their time is out."""
    workers = attempt.workers()
    if not workers:
        return False
    stopped = workers if draw.random() < 0.2 else [draw.choice(workers)]
    found = [send(worker, signal.SIGSTOP) for worker in stopped]
    if draw.random() < 0.5:  # else other faults come on top
        wait_until(lambda: not {*stopped}.intersection(attempt.workers()), attempt, FOUND_SECONDS)
    return any(found)


def fill_disk(attempt: Attempt, draw: random.Random) -> bool:
    """No space is left on the disk of the run's folder, for a while."""
    before = attempt.faults.num_failed
    attempt.faults.set_full(True)
    attempt.wait(draw.uniform(0.1, 1.0))
    attempt.faults.set_full(False)
    return attempt.faults.num_failed > before


def fail_call(attempt: Attempt, draw: random.Random) -> bool:
    """One of the next file-system calls gets EIO, or is the last of its process."""
    before = attempt.faults.num_failed
    attempt.faults.fail(draw.randint(1, 15), draw.choice([EIO, 0]))
    wait_until(lambda: attempt.faults.num_failed > before, attempt, 2.0)
    return attempt.faults.num_failed > before


def flip_bit(attempt: Attempt, draw: random.Random) -> bool:
    """A bit of one replica flips after an update, and has to be found before the next fault.

    With one device there is nothing to compare it with. Nor is there where all other ranks die before replicas are
    compared: so the run is left alone before and after.
    """
    if attempt.num_devices == 1 or attempt.wait(1.0):
        return False
    workers, bit = attempt.workers(), draw.choice([*range(10, 23), 30])
    if len(workers) == 1:
        return False
    rank = draw.randrange(attempt.num_devices)
    before, num_found = attempt.flips.count, num_drifts(attempt)
    attempt.flips.arm(*((draw.choice(workers), 0) if workers else (attempt.process, rank)), bit)
    wait_until(lambda: attempt.flips.count > before, attempt, 2.0)
    attempt.flips.arm(0, 0, 0)
    if attempt.flips.count == before:
        return False
    wait_until(lambda: num_drifts(attempt) > num_found, attempt, FOUND_SECONDS)
    if num_drifts(attempt) == num_found:
        raise NotFound(f"bit {bit} was flipped, and no rank was named")
    return True


def num_drifts(attempt: Attempt) -> int:
    """How often it has said that replicas differ, or that the numbers of one are no longer finite."""
    said = attempt.output.with_suffix(".err").read_text(errors="replace")
    return len(re.findall(r"not equal .*any more|NaN or infinite|first in the gradient of", said))


def wait_until(condition: Callable[[], bool], attempt: Attempt, seconds: float) -> None:
    """Until it is so, the attempt is over, or the time is."""
    deadline = time.monotonic() + seconds
    while not condition() and not attempt.is_over() and time.monotonic() < deadline:
        time.sleep(0.01)


def damage_checkpoint(folder: Path, draw: random.Random) -> bool:
    """Between two attempts: the newest checkpoint has a wrong bit, or is cut off; there is one before it."""
    paths = sorted((folder / "checkpoints").glob("step-*.safetensors"))
    if len(paths) < 2:
        return False
    content = bytearray(paths[-1].read_bytes())
    if draw.random() < 0.7:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        del content[draw.randrange(len(content)) :]
    paths[-1].write_bytes(content)
    return True


# name -> (fault, how often it is drawn)
FAULTS: dict[str, tuple[Callable[[Any, random.Random], bool], int]] = {
    "kill all": (kill_all, 3),
    "kill the main process": (kill_main, 2),
    "kill a worker": (kill_worker, 5),
    "interrupt": (interrupt, 2),
    "stop for a while": (stop_for_a_while, 4),
    "stop for good": (stop_for_good, 2),
    "full disk": (fill_disk, 3),
    "a call fails": (fail_call, 3),
    "flipped bit": (flip_bit, 4),
}
DAMAGE = "damaged checkpoint"
