"""Workers that have gone silent: nobody may be waiting for them, so the supervisor itself has to notice."""

import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.runtime.launch.heartbeat import SECONDS, last_heartbeats
from lockstep.runtime.launch.private_store import PrivateStore

RUNNING, STOPPED = "R", "Tt"  # states of a process, in /proc


@dataclass
class Signs:
    """What was seen of a worker, and for how long it has been the same."""

    of_life: tuple[bytes, int]
    seconds: float = 0.0


class SilenceWatch:
    """Finds workers that have neither sent a heartbeat nor used a processor for `seconds`.

    Who computes without letting its heartbeat thread run, or waits for a processor, is slow and not silent. Time in
    which the supervisor itself was stopped does not count.
    """

    def __init__(self, store: PrivateStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._signs: dict[int, Signs] = {}
        self._looked_at = time.monotonic()

    def find_silent(self, workers: dict[int, int]) -> list[int]:
        """Which of the workers, with their processes, are silent now; to be called again and again."""
        passed = time.monotonic() - self._looked_at
        if passed < SECONDS:
            return []
        self._looked_at += passed
        self._signs = {worker: self._look(worker, process, passed) for worker, process in workers.items()}
        return [worker for worker, signs in self._signs.items() if signs.seconds > self._seconds]

    def _look(self, worker: int, process: int, passed: float) -> Signs:
        key = f"heartbeat/{worker}"
        heartbeat = self._store.get(key) if self._store.check([key]) else b""
        state, ticks = state_and_ticks(process)
        now, before = Signs((heartbeat, ticks)), self._signs.get(worker)
        if before is not None and before.of_life == now.of_life and state != RUNNING:
            now.seconds = before.seconds + min(passed, 2 * SECONDS)
        return now

    def describe(self, worker: int, process: int) -> str:
        """Where a silent worker was last, and what has become of it."""
        said = last_heartbeats(self._store, [str(worker)])[0]
        state, _ = state_and_ticks(process)
        what = "it is stopped (SIGSTOP)" if state and state in STOPPED else "it sends no heartbeat"
        if said is None:
            return f"has never sent a heartbeat; {what}"
        at = f", at {said['line']}" if said["line"] else ""
        return f"is in {said['phase']} of step {said['step']}{at}; {what}"


def state_and_ticks(process: int) -> tuple[str, int]:
    """The state of a process and the processor time that it has used; nothing where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return "", 0
