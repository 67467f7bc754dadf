"""A worker's side of a run in processes: it joins a generation, connects to the others, and says what went wrong."""

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from lockstep.core.device import Device
from lockstep.runtime.process_group import LOOPBACK, Group, join_store, store_under
from lockstep.runtime.rank_thread import RankThread
from lockstep.runtime.launch.heartbeat import Whereabouts, find_late
from lockstep.core.errors import LockstepError, OutOfMemory, PeersLost
from lockstep.core.entry_points import user_traceback

POLL_SECONDS = 0.05
STORE_SECONDS = 30.0
NO_MEMORY = 12  # exit status of a worker whose memory ran out: it is not started anew


@dataclass(frozen=True)
class Generation:
    """Who works together, until somebody dies."""

    number: int
    workers: list[int]  # by rank
    devices: list[Device]  # by rank
    notes: list[str] = field(default_factory=list)  # what happened since the one before


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
