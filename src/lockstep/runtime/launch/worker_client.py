"""A worker's side of a run in processes: it joins a generation, connects to the others, and reports what went wrong."""

import json
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.core.device import Device
from lockstep.core.errors import LockstepError, OutOfMemory, PeerFailure, RunError
from lockstep.core.source_lines import user_traceback
from lockstep.runtime.engine import Position
from lockstep.runtime.launch.heartbeat import Heartbeat, find_stragglers
from lockstep.runtime.launch.private_store import WorkerStore
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.rank_thread import run_watched
from lockstep.runtime.store import LOOPBACK, file_store, prefix_store

POLL_SECONDS = 0.05
STORE_SECONDS = 30.0
MAX_ATTEMPTS, PROOF_SECONDS = 10, 5.0  # to connect; for all to prove that they belong to the run
ARRIVAL_SECONDS = 2.0  # for those who arrive after their own deadline, to say so
MAX_CHARACTERS = 1 << 20  # of an error's message or trace
NO_MEMORY = 12  # exit status of a worker whose memory ran out: it is not restarted


@dataclass(frozen=True)
class Generation:
    """The workers that work together, until one of them dies."""

    number: int
    workers: list[int]  # by rank
    devices: list[Device]  # by rank
    notes: list[str] = field(default_factory=list)  # what happened since the one before


class Secrets(NamedTuple):
    """What only the processes of one run have: they inherit it."""

    rendezvous: int  # the descriptor of a file in memory, where ranks leave their addresses
    key: bytes  # which they prove to each other that they have


class WorkerClient:
    """A worker's connection to the supervisor and to the other workers."""

    def __init__(self, worker: int, connection: socket.socket, secrets: "Secrets", timeout: float) -> None:
        self.worker, self._secrets, self._timeout = worker, secrets, timeout
        self._store = WorkerStore(connection, STORE_SECONDS)
        self.position = Position()
        self.heartbeat = Heartbeat(self.position, self._store, str(worker))

    def join(self, number: int) -> Generation:
        """The first generation from `number` on that this worker is in; waits for it."""
        while True:
            found = self._wait_for(f"generation/{number}")
            devices = [Device(name) for name in found["devices"]]
            if self.worker in found["workers"]:
                return Generation(number, found["workers"], devices, found["notes"])
            number += 1

    def connect(self, generation: Generation) -> ProcessGroup:
        """Connections to the others of the generation."""
        self._rendezvous(generation, "arrived", "", time.monotonic())
        for attempt in range(MAX_ATTEMPTS):
            began, failed = time.monotonic(), ""
            with ExitStack() as undo:
                try:
                    group = self._connect(generation, attempt)
                    undo.callback(group.close)
                except PeerFailure as failure:
                    failed = str(failure)
                said = self._rendezvous(generation, f"connected-{attempt}", failed, began)  # all, or all once more
                if not any(said):
                    undo.pop_all()
                    return group
        why = next(filter(None, said)).rstrip(".")
        raise RunError(
            f"{MAX_ATTEMPTS} times, not all ranks were connected to each other: {why}. End the other program on this "
            f"machine that connects to them; or use --engine inprocess, which needs no connections"
        )

    def _connect(self, generation: Generation, attempt: int) -> ProcessGroup:
        """Connections to the others; they fail where a stranger was faster than one of them."""
        number, rank = generation.number, generation.workers.index(self.worker)

        def connect() -> ProcessGroup:
            store = prefix_store(f"group/{number}/{attempt}", file_store(self._secrets.rendezvous, self._timeout))
            secret = self._secrets.key + number.to_bytes(8, "little") + attempt.to_bytes(8, "little")
            return ProcessGroup(
                store, rank, generation.devices, LOOPBACK, self._timeout, secret, proof_seconds=PROOF_SECONDS
            )

        # the thread waits for those who die on the way; we need not
        return run_watched(f"lockstep-connect-{number}", connect, lambda: self._check_that_all_live(number))

    def _rendezvous(self, generation: Generation, place: str, said: str, began: float) -> list[str]:
        """Waits for all workers of the generation, who are on their way since `began`; what each has said, by rank."""
        keys = [f"{place}/{generation.number}/{worker}" for worker in generation.workers]
        self._store.set(f"{place}/{generation.number}/{self.worker}", said)
        # who waits for one that hangs notices a death only when its own deadline is over
        deadline = began + self._timeout + ARRIVAL_SECONDS
        while missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
            self._check_that_all_live(generation.number)
            if time.monotonic() > deadline:
                failure = PeerFailure("Not all workers have arrived.")
                failure.stragglers = tuple(missing)
                raise failure
        return [self._store.get(key).decode() for key in keys]

    def is_to_stop(self) -> bool:
        """Whether the user has asked for it."""
        return self._store.check(["stop"])

    def report_connected(self, generation: Generation) -> None:
        """Tells the supervisor that all of the generation are connected: its notes have been read."""
        self._store.set(f"connected/{generation.number}", "")

    def _check_that_all_live(self, number: int) -> None:
        if self._store.check([f"generation/{number + 1}"]):
            raise PeerFailure("Not all workers of this generation are alive.")
        time.sleep(POLL_SECONDS / 5)

    def report_failure(self, generation: Generation, failure: PeerFailure) -> None:
        """Tells the supervisor that other ranks failed, where this one was, and who did not arrive."""
        stragglers: list[int] = []
        rank, said = generation.workers.index(self.worker), str(failure)
        where = f"{self.position.phase} of step {self.position.step}"
        account = f"rank {rank} ({generation.devices[rank]}) was in {where} ({said.rstrip('.')})"
        if failure.stragglers:
            names = list(map(str, generation.workers))
            stragglers, said = find_stragglers(
                self._store, names, generation.devices, rank, only=list(failure.stragglers)
            )
        elif failure.timed_out and not self._store.check([f"generation/{generation.number + 1}"]):
            names = list(map(str, generation.workers))
            stragglers, said = find_stragglers(self._store, names, generation.devices, rank)
        number = self._store.add(f"failure/{generation.number}", 1)
        report = {"stragglers": stragglers, "said": said, "account": account}
        self._store.set(f"failure/{generation.number}/{number}", json.dumps(report))

    def report_finished(self) -> None:
        """Tells the supervisor that this worker has done its work: user code can end a process, too."""
        self._store.set(f"finished/{self.worker}", "")

    def report_error(self, sentence: str, exit_status: int, trace: str, has_diverged: bool = False) -> None:
        """Tells the supervisor why this worker ends."""
        said = {"sentence": sentence[:MAX_CHARACTERS], "exit_status": exit_status, "trace": trace[-MAX_CHARACTERS:]}
        self._store.set(f"error/{self.worker}", json.dumps(said | {"has_diverged": has_diverged}))

    def wait_for_next(self, generation: Generation) -> None:
        """This worker is done. It stays until all are, in case it has to take over from one that dies."""
        self._wait_for(f"generation/{generation.number + 1}")

    def _wait_for(self, key: str) -> Any:
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        return json.loads(self._store.get(key))


def run_worker(client: WorkerClient, work: Callable[[WorkerClient], None]) -> int:
    """`work`, with errors reported to the supervisor, who prints them once; gives the exit status."""
    try:
        work(client)
    except OutOfMemory as problem:
        client.report_error(str(problem), problem.exit_status, "")
        return NO_MEMORY
    except LockstepError as problem:
        cause, has_diverged = problem.__cause__, isinstance(problem, RunError) and problem.has_diverged
        trace = user_traceback(cause) if cause is not None else ""
        client.report_error(str(problem), problem.exit_status, trace, has_diverged)
        return problem.exit_status
    except BaseException as problem:
        client.report_error(f"{type(problem).__name__}: {problem}", 1, traceback.format_exc().rstrip())
        return 1
    else:
        client.report_finished()
    finally:
        client.heartbeat.stop()
    return 0
