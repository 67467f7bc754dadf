"""Heartbeats: each process writes into the store where it is, so that the others can say who is late, and where."""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.core.device import Device
from lockstep.core.files import printable
from lockstep.core.source_lines import source_line_of
from lockstep.runtime.engine import Position
from lockstep.runtime.store import Store

T = TypeVar("T")
SECONDS = 0.5  # between two heartbeats


class Heartbeat:
    """Writes this process's position, and the source line of the thread that made it, into a store."""

    def __init__(self, position: Position, store: Store, name: str) -> None:
        self._position, self._store, self._name = position, store, name
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lockstep-heartbeat")
        self._thread.start()

    def stop(self) -> None:
        """No more heartbeats. The thread has to be over before the process ends."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _beat(self) -> None:
        count = 0
        while not self._stopped.wait(SECONDS if count else 0):
            count += 1
            frame, position = sys._current_frames().get(self._main), self._position
            said = {"count": count, "step": position.step, "phase": position.phase, "line": source_line_of(frame)}
            try:
                self._store.set(f"heartbeat/{self._name}", json.dumps(said))
            except RuntimeError:  # the store is gone, and so is the run
                return


def ask(question: Callable[[], T], seconds: float) -> T:
    """What a store answers, in time: on its own it waits for ever where the connection to it is cut without notice."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((question(), None))
        except BaseException as problem:
            answers.put((None, problem))

    threading.Thread(target=answer, daemon=True, name="lockstep-ask").start()
    try:
        found, problem = answers.get(timeout=seconds)
    except queue.Empty:
        raise RuntimeError(f"no answer within {seconds:g} s") from None
    if problem is not None:
        raise problem
    return found  # type: ignore[return-value]


def last_heartbeats(store: Store, names: list[str]) -> list[dict[str, Any] | None]:
    """The last heartbeat of each process; None where there was none."""
    found: list[dict[str, Any] | None] = []
    for name in names:
        key = f"heartbeat/{name}"
        found.append(_heartbeat(store.get(key)) if store.check([key]) else None)
    return found


def _heartbeat(said: bytes) -> dict[str, Any] | None:
    """A heartbeat; None where it is something else: torchrun's store takes values from anybody."""
    try:
        found = json.loads(said[:4096])
        plain = {"count": int(found["count"]), "step": int(found["step"])}
        texts = {name: printable(str(found[name]))[:500] for name in ("phase", "line")}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return {**plain, **texts}


def find_stragglers(
    store: Store, names: list[str], devices: list[Device], own: int, only: list[int] | None = None
) -> tuple[list[int], str]:
    """The ranks that did not arrive where rank `own` waits, and for each where it was last, and if it is alive.

    Where it is known who they are, `only` those are looked at.
    """
    before = last_heartbeats(store, names)
    time.sleep(3 * SECONDS)
    now = last_heartbeats(store, names)
    here = now[own] or {"step": 0}
    stragglers, sentences = [], []
    for rank, (then, said) in enumerate(zip(before, now, strict=True)):
        if rank == own or (only is not None and rank not in only):
            continue
        who = f"rank {rank} ({devices[rank]})"
        if said is None:
            stragglers.append(rank)
            sentences.append(f"{who} has never sent a heartbeat")
            continue
        is_silent = then is not None and then["count"] == said["count"]
        # who writes a checkpoint is expected to take its time
        is_behind = (said["step"], said["phase"] in ("exchange", "checkpoint")) < (here["step"], True)
        if is_silent or is_behind or only is not None:
            at = f", at {said['line']}" if said["line"] else ""
            how = "it sends no heartbeat" if is_silent else "it is alive"
            stragglers.append(rank)
            sentences.append(f"{who} is in {said['phase']} of step {said['step']}{at}; {how}")
    return stragglers, "; ".join(sentences)
