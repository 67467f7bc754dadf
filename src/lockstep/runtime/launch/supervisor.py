"""Starts a worker process for each device, watches over them, and continues when one of them dies.

The supervisor is the process that the user started. It forks the workers from itself when everything is loaded and
checked: they start at once, and share what was loaded. It keeps the store in which they find each other, so that any of
them may die. Whoever is alive belongs to a *generation*; when one dies, the supervisor writes the next one into the
store, and the others connect again in it.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from lockstep.core.child_process import die_with, fork
from lockstep.core.device import Device
from lockstep.core.errors import Interrupted, RunError
from lockstep.core.interrupts import SIGNALS, Interrupts
from lockstep.runtime.launch.private_store import PrivateStore, SupervisorGone
from lockstep.runtime.launch.silence import SilenceWatch
from lockstep.runtime.launch.worker_client import NO_MEMORY, POLL_SECONDS, Secrets, WorkerClient, run_worker
from lockstep.runtime.store import private_file

END_FACTOR = 5.0  # times --timeout: to end a step and to save it, after an interrupt
SILENT_SECONDS = 3.0  # after --timeout, for those who wait for a silent worker to name it first
GRACE_SECONDS = 5.0  # for a death to be noticed, once a worker has reported that its peers failed


class WorkerFailed(RunError):
    """A worker's own error, in its words."""

    def __init__(self, sentence: str, exit_status: int = 1, trace: str = "", is_recorded: bool = False) -> None:
        super().__init__(sentence)
        self.exit_status, self.trace, self.is_recorded = exit_status, trace, is_recorded


class Supervisor:
    """Runs `work(client)` in a process for each device; `supervise` returns when rank 0 has finished."""

    def __init__(
        self,
        devices: list[Device],
        work: Callable[[WorkerClient], None],
        timeout: float,
        drops_hung: bool,
        max_restarts: int,
    ) -> None:
        self._slots, self._work, self._timeout = devices, work, timeout
        self._drops_hung, self._restarts_left = drops_hung, max_restarts
        self._store = PrivateStore()
        self._silence = SilenceWatch(self._store, timeout + SILENT_SECONDS)
        self._secrets = Secrets(private_file(), os.urandom(32))
        self._workers: dict[int, tuple[int, int]] = {}  # worker -> (process, slot)
        self._num_started = 0
        self._generation = -1
        self._by_rank: list[int] = []
        self._failed_at: float | None = None  # when the first of this generation reported that its peers failed
        self._num_read = 0  # of these reports
        self._accounts: list[str] = []  # what they say
        self._stragglers: list[int] = []  # ranks of this generation that hang
        self._dropped: set[int] = set()  # workers that were ended for it
        self._notes: list[str] = []  # that no generation has shown yet
        self._num_passed_on = 0  # of them, to the generation that is about to connect

    def supervise(self, quiet: bool = False) -> None:
        """Starts the workers and sees the run through."""
        with Interrupts(notify=not quiet, raises=False) as interrupts:
            interrupted = 0.0
            try:
                for slot in range(len(self._slots)):
                    self._start(slot)
                self._next_generation([])
                while not self._watch():
                    self._drop_read_notes()
                    if interrupts.count > 1:
                        raise Interrupted("interrupted a second time: the workers were ended at once.")
                    if interrupts.requested:
                        self._store.set("stop", "")
                        self._end_after(interrupted := interrupted or time.monotonic())
                    time.sleep(POLL_SECONDS)
            finally:
                self._end_all()
                if sys.stderr.isatty():
                    sys.stderr.write("\x1b[?25h")  # a bar hides the cursor, and its process may have been killed
                    sys.stderr.flush()

    def _end_after(self, interrupted: float) -> None:
        """Ends workers that hang: they have not come to the end of a step, and saved it, in a long time."""
        seconds = END_FACTOR * self._timeout
        if time.monotonic() > interrupted + seconds:
            raise Interrupted(f"interrupted, and the workers have not stopped in {seconds:g} s: they were ended.")

    def _watch(self) -> bool:
        """Looks at every worker once; True when the run is done."""
        gone = []
        for worker, (process, slot) in list(self._workers.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self._workers[worker]
                gone.append((worker, self._by_rank.index(worker), slot, os.waitstatus_to_exitcode(status)))
        if any(rank == 0 and code == 0 and self._store.check([f"finished/{worker}"]) for worker, rank, _, code in gone):
            return True
        if gone:
            notes = [self._on_worker_exit(*one) for one in gone]
            if not self._workers:
                raise WorkerFailed(f"{'; '.join([*self._notes, *notes])}. No worker is left.")
            self._next_generation(notes)
        self._read_failures()
        self._look_for_silence()
        return False

    def _on_worker_exit(self, worker: int, rank: int, slot: int, code: int) -> str:
        """A worker has ended: the run ends with its own words, or goes on without it; says what happened."""
        who = f"rank {rank} ({self._slots[slot]})"
        error = self._error_of(worker)
        if error is not None and code != NO_MEMORY:
            failed = WorkerFailed(error["sentence"], error["exit_status"], error["trace"], is_recorded=rank == 0)
            failed.has_diverged = error["has_diverged"]
            raise failed
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

    def _read_failures(self) -> None:
        """Reads what workers report of failed peers: where nobody has died, somebody hangs, or a connection broke."""
        number = self._generation
        while self._num_read < self._store.add(f"failure/{number}", 0):
            key = f"failure/{number}/{self._num_read + 1}"
            if not self._store.check([key]):
                break  # it is being written
            self._num_read += 1
            said = json.loads(self._store.get(key))
            self._failed_at = self._failed_at or time.monotonic()
            self._accounts.append(said["account"])
            if said["stragglers"] and not self._stragglers:
                self._hang(said["stragglers"], f"the others waited {self._timeout:g} s (--timeout): {said['said']}")
        if self._failed_at is not None and time.monotonic() > self._failed_at + GRACE_SECONDS and not self._stragglers:
            if not self._restarts_left:
                raise WorkerFailed(
                    f"The connections between the ranks broke, though none of them died: {'; '.join(self._accounts)}. "
                    f"No restart is left (--max-restarts). Check the memory and the network of this machine; with "
                    f"GPUs, NCCL_DEBUG=WARN in the environment says more, and --engine inprocess needs no connections."
                )
            self._restarts_left -= 1
            self._next_generation([f"the connections between the ranks broke and are made anew: {self._accounts[0]}"])

    def _look_for_silence(self) -> None:
        """A worker that is stopped is noticed here where no other waits for it: it may be the only one."""
        silent = self._silence.find_silent({worker: process for worker, (process, _) in self._workers.items()})
        if silent and not self._stragglers:
            ranks = [self._by_rank.index(worker) for worker in silent]
            said = [
                f"rank {rank} ({self._slots[self._workers[worker][1]]}) "
                f"{self._silence.describe(worker, self._workers[worker][0])}"
                for rank, worker in zip(ranks, silent, strict=True)
            ]
            self._hang(ranks, f"no sign of life for {self._timeout:g} s (--timeout): {'; '.join(said)}")

    def _hang(self, stragglers: list[int], sentence: str) -> None:
        if not self._drops_hung:
            advice = "If it is only slow, use a larger --timeout"
            if len(stragglers) < len(self._workers):
                advice += "; --on-hang drop continues without it"
            raise WorkerFailed(f"{sentence}. {advice}.")
        self._stragglers = stragglers
        self._dropped.update(self._by_rank[rank] for rank in stragglers)
        self._notes.append(sentence)
        for rank in stragglers:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(self._workers[self._by_rank[rank]][0], signal.SIGKILL)

    def _next_generation(self, notes: list[str]) -> None:
        self._notes += notes
        self._num_passed_on = len(self._notes)
        self._generation += 1
        self._by_rank = sorted(self._workers, key=lambda worker: self._workers[worker][1])
        self._failed_at, self._num_read, self._stragglers, self._accounts = None, 0, [], []
        record = {
            "workers": self._by_rank,
            "devices": [str(self._slots[self._workers[worker][1]]) for worker in self._by_rank],
            "notes": self._notes,
        }
        self._store.set(f"generation/{self._generation}", json.dumps(record))

    def _drop_read_notes(self) -> None:
        """What happened is passed on to every generation until one is connected, and can show it."""
        if self._num_passed_on and self._store.check([f"connected/{self._generation}"]):
            del self._notes[: self._num_passed_on]
            self._num_passed_on = 0

    def _start(self, slot: int) -> None:
        worker, parent = self._num_started, os.getpid()
        self._num_started += 1
        sys.stdout.flush()
        sys.stderr.flush()
        connection = self._store.new_connection()
        with warnings.catch_warnings():  # about forking while there are threads: the store's has nothing to do with us
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process = fork()
        if process == 0:
            self._become_worker(worker, parent, connection)
        self._store.serve(connection)
        self._workers[worker] = (process, slot)

    def _become_worker(self, worker: int, parent: int, connection: socket.socket) -> NoReturn:
        status = 1
        try:
            self._store.leave()
            die_with(parent)
            for number in SIGNALS:  # they may be sent to all processes: the supervisor passes them on
                signal.signal(number, signal.SIG_IGN)
            client = WorkerClient(worker, connection, self._secrets, self._timeout)
            status = run_worker(client, self._work)
        except SupervisorGone:  # killed, say: it is noticed here, or by the system, whichever is first
            pass
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
        self._store.close()
        os.close(self._secrets.rendezvous)


def name_of_signal(number: int) -> str:
    """What it is called; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
