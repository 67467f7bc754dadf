"""Starts a worker process for each device, watches over them, and goes on when one of them dies.

The supervisor is the process that the user started. It forks the workers from itself when everything is loaded and
checked: they start at once, and share what was loaded. It keeps the store in which they find each other, so that any of
them may die. Whoever is alive belongs to a *generation*; when one dies, the supervisor writes down the next, and the
others meet again in it.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from lockstep.device import Device
from lockstep.engines.children import die_with
from lockstep.engines.group import LOOPBACK, Group, join_store, serve_store, store_under
from lockstep.engines.threads import RankThread
from lockstep.engines.whereabouts import Whereabouts, find_late
from lockstep.errors import Interrupted, LockstepError, OutOfMemory, PeersLost, RunError
from lockstep.interrupts import SIGNALS, Interrupts
from lockstep.named import user_traceback

POLL_SECONDS = 0.05
STORE_SECONDS = 30.0
GRACE_SECONDS = 5.0  # for a death to be noticed, once others have lost somebody
NO_MEMORY = 12  # exit status of a worker whose memory ran out: it is not started anew


@dataclass(frozen=True)
class Generation:
    """Who works together, until somebody dies."""

    number: int
    workers: list[int]  # by rank
    devices: list[Device]  # by rank
    notes: list[str] = field(default_factory=list)  # what happened since the one before


class Failed(RunError):
    """A worker's own error, in its words."""

    def __init__(self, sentence: str, exit_status: int = 1, trace: str = "", is_recorded: bool = False) -> None:
        super().__init__(sentence)
        self.exit_status, self.trace, self.is_recorded = exit_status, trace, is_recorded


# ---------------------------------------------------------------------------------------------------- a worker's side


class Member:
    """A worker's place among the others."""

    def __init__(self, worker: int, port: int, timeout: float) -> None:
        self.worker, self._port, self._timeout = worker, port, timeout
        self._store = join_store(LOOPBACK, port, STORE_SECONDS)
        self.whereabouts = Whereabouts()
        self.whereabouts.tell(join_store(LOOPBACK, port, STORE_SECONDS), str(worker))

    def join(self, number: int) -> Generation:
        """The first generation from `number` on that this worker is in; waits for it."""
        while True:
            found = self._wait_for(f"generation/{number}")
            devices = [Device(name) for name in found["devices"]]
            if self.worker in found["workers"]:
                return Generation(number, found["workers"], devices, found["notes"])
            number += 1

    def connect(self, generation: Generation) -> Group:
        """Connections to the others of the generation."""
        number, rank = generation.number, generation.workers.index(self.worker)

        def meet() -> Group:
            store = store_under(f"group/{number}", join_store(LOOPBACK, self._port, STORE_SECONDS))
            return Group(store, rank, generation.devices, LOOPBACK, self._timeout)

        self._store.set(f"arrived/{number}/{self.worker}", "")
        # who waits for one that hangs notices a death only when its own deadline is over
        deadline = time.monotonic() + 2 * self._timeout + STORE_SECONDS / 3
        while late := self._missing(generation):
            self._check_that_all_live(number)
            if time.monotonic() > deadline:
                lost = PeersLost("Not all workers have come.")
                lost.late = tuple(late)
                raise lost
        meeting = RankThread(f"lockstep-connect-{number}")  # it waits for those who die on the way; we need not
        future = meeting.submit(meet)
        meeting.end(waits=False)
        while not future.done():
            self._check_that_all_live(number)
        return cast(Group, future.result())

    def _missing(self, generation: Generation) -> list[int]:
        """The ranks that are not there yet."""
        keys = [f"arrived/{generation.number}/{worker}" for worker in generation.workers]
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def is_to_stop(self) -> bool:
        """Whether the user has asked for it."""
        return self._store.check(["stop"])

    def tell_met(self, generation: Generation) -> None:
        """Tells the supervisor that all of the generation have met: what it has noted was heard."""
        self._store.set(f"met/{generation.number}", "")

    def _check_that_all_live(self, number: int) -> None:
        if self._store.check([f"generation/{number + 1}"]):
            raise PeersLost("Not all workers of this generation are alive.")
        time.sleep(POLL_SECONDS / 5)

    def tell_lost(self, generation: Generation, lost: PeersLost) -> None:
        """Tells the supervisor that others were lost, and who did not arrive."""
        late: list[int] = []
        said = str(lost)
        if lost.late:
            late = list(lost.late)
            said = "; ".join(f"rank {rank} ({generation.devices[rank]}) has not come" for rank in late)
        elif lost.is_late and not self._store.check([f"generation/{generation.number + 1}"]):
            rank = generation.workers.index(self.worker)
            late, said = find_late(self._store, list(map(str, generation.workers)), list(generation.devices), rank)
        number = self._store.add(f"lost/{generation.number}", 1)
        self._store.set(f"lost/{generation.number}/{number}", json.dumps({"late": late, "said": said}))

    def tell_error(self, sentence: str, exit_status: int, trace: str) -> None:
        """Tells the supervisor why this worker ends."""
        said = {"sentence": sentence, "exit_status": exit_status, "trace": trace}
        self._store.set(f"error/{self.worker}", json.dumps(said))

    def wait_for_the_next(self, generation: Generation) -> None:
        """This worker is done. It stays until all are, in case somebody has to take over from one that dies."""
        self._wait_for(f"generation/{generation.number + 1}")

    def _wait_for(self, key: str) -> Any:
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        return json.loads(self._store.get(key))


# ----------------------------------------------------------------------------------------------- the supervisor's side


class Supervisor:
    """Runs `work(member)` in a process for each device; `supervise` returns when the first rank has finished."""

    def __init__(
        self,
        devices: list[Device],
        work: Callable[[Member], None],
        timeout: float,
        drops_hung: bool,
        max_restarts: int,
    ) -> None:
        self._slots, self._work, self._timeout = devices, work, timeout
        self._drops_hung, self._restarts_left = drops_hung, max_restarts
        self._store: Any
        self._store, self._port, self._listener = serve_store()
        self._workers: dict[int, tuple[int, int]] = {}  # worker -> (process, slot)
        self._num_started = 0
        self._generation = -1
        self._by_rank: list[int] = []
        self._lost_at: float | None = None  # when the first of this generation said that it lost somebody
        self._num_heard = 0
        self._late: list[int] = []  # ranks of this generation that hang
        self._dropped: set[int] = set()  # workers that were ended for it
        self._notes: list[str] = []  # that nobody has heard yet
        self._num_told = 0  # of them, to the generation that is about to meet

    def supervise(self, quiet: bool = False) -> None:
        """Starts the workers and sees the run through."""
        with Interrupts(says=not quiet) as interrupts:
            try:
                for slot in range(len(self._slots)):
                    self._start(slot)
                self._next_generation([])
                while not self._watch():
                    self._forget_what_was_heard()
                    if interrupts.requested:
                        self._store.set("stop", "")
                    time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                raise Interrupted("interrupted a second time: the workers were ended at once.") from None
            finally:
                self._end_all()
                if sys.stderr.isatty():
                    sys.stderr.write("\x1b[?25h")  # a bar hides the cursor, and its process may have been killed
                    sys.stderr.flush()

    def _watch(self) -> bool:
        """Looks at every worker once; True when the run is done."""
        gone = []
        for worker, (process, slot) in list(self._workers.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self._workers[worker]
                gone.append((worker, self._by_rank.index(worker), slot, os.waitstatus_to_exitcode(status)))
        if any(rank == 0 and code == 0 for _, rank, _, code in gone):
            return True
        if gone:
            notes = [self._gone(*one) for one in gone]
            if not self._workers:
                raise Failed(f"{'; '.join(notes)}. No worker is left.")
            self._next_generation(notes)
        self._listen()
        return False

    def _gone(self, worker: int, rank: int, slot: int, code: int) -> str:
        """A worker has ended: the run ends with its own words, or goes on without it; says what happened."""
        who = f"rank {rank} ({self._slots[slot]})"
        error = self._error_of(worker)
        if error is not None and code != NO_MEMORY:
            raise Failed(error["sentence"], error["exit_status"], error["trace"], is_recorded=rank == 0)
        if worker in self._dropped:
            what = f"{who} was dropped"
        elif error is not None:
            what = error["sentence"]
        elif code < 0:
            what = f"{who} was killed by {name_of_signal(-code)}"
        else:
            what = f"{who} ended with exit status {code}"
        if self._restarts_left and error is None and worker not in self._dropped:
            self._restarts_left -= 1
            self._start(slot)
            what += "; a new worker takes its place"
        return what

    def _error_of(self, worker: int) -> dict[str, Any] | None:
        key = f"error/{worker}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _listen(self) -> None:
        """Hears from workers that lost others: where nobody has died, somebody hangs, or a connection broke."""
        number = self._generation
        while self._num_heard < self._store.add(f"lost/{number}", 0):
            key = f"lost/{number}/{self._num_heard + 1}"
            if not self._store.check([key]):
                break  # it is being written
            self._num_heard += 1
            said = json.loads(self._store.get(key))
            self._lost_at = self._lost_at or time.monotonic()
            if said["late"] and not self._late:
                self._hang(said["late"], said["said"])
        if self._lost_at is not None and time.monotonic() > self._lost_at + GRACE_SECONDS and not self._late:
            if not self._restarts_left:
                raise Failed("The workers lost each other again and again.")
            self._restarts_left -= 1
            self._next_generation(["the workers lost each other, and meet anew"])

    def _hang(self, late: list[int], said: str) -> None:
        sentence = f"after {self._timeout:g} s in an exchange: {said}"
        if not self._drops_hung:
            raise Failed(
                f"{sentence}. A longer --timeout waits longer, --on-hang drop goes on without those that hang."
            )
        if len(late) == len(self._by_rank):
            raise Failed(f"{sentence}. Nobody is left to go on without them.")
        self._late = late
        self._dropped.update(self._by_rank[rank] for rank in late)
        self._notes.append(sentence)
        for rank in late:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(self._workers[self._by_rank[rank]][0], signal.SIGKILL)

    def _next_generation(self, notes: list[str]) -> None:
        self._notes += notes
        self._num_told = len(self._notes)
        self._generation += 1
        self._by_rank = sorted(self._workers, key=lambda worker: self._workers[worker][1])
        self._lost_at, self._num_heard, self._late = None, 0, []
        record = {
            "workers": self._by_rank,
            "devices": [str(self._slots[self._workers[worker][1]]) for worker in self._by_rank],
            "notes": self._notes,
        }
        self._store.set(f"generation/{self._generation}", json.dumps(record))

    def _forget_what_was_heard(self) -> None:
        """What happened is told to every generation until one has met, and can say it."""
        if self._num_told and self._store.check([f"met/{self._generation}"]):
            del self._notes[: self._num_told]
            self._num_told = 0

    def _start(self, slot: int) -> None:
        worker, parent = self._num_started, os.getpid()
        self._num_started += 1
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():  # of forking while there are threads: the store's has nothing to do with us
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process = os.fork()
        if process == 0:
            self._become_worker(worker, parent)
        self._workers[worker] = (process, slot)

    def _become_worker(self, worker: int, parent: int) -> NoReturn:
        status = 1
        try:
            os.close(self._listener)
            die_with(parent)
            for number in SIGNALS:  # they may go to all: the supervisor tells who has to know
                signal.signal(number, signal.SIG_IGN)
            status = run_worker(worker, self._port, self._timeout, self._work)
        except BaseException:  # nothing of the parent's must run in the child
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _end_all(self) -> None:
        for process, _ in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process, _ in self._workers.values():
            os.waitpid(process, 0)
        self._workers.clear()
        self._store = None  # which ends its thread and its sockets


def name_of_signal(number: int) -> str:
    """What it is called; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_worker(worker: int, port: int, timeout: float, work: Callable[[Member], None]) -> int:
    """`work`, with errors told to the supervisor, who says them once; gives the exit status."""
    member = Member(worker, port, timeout)
    try:
        work(member)
    except OutOfMemory as problem:
        member.tell_error(str(problem), problem.exit_status, "")
        return NO_MEMORY
    except LockstepError as problem:
        cause = problem.__cause__
        member.tell_error(str(problem), problem.exit_status, user_traceback(cause) if cause is not None else "")
        return problem.exit_status
    except BaseException as problem:
        member.tell_error(f"{type(problem).__name__}: {problem}", 1, traceback.format_exc().rstrip())
        return 1
    finally:
        member.whereabouts.stop()
    return 0
