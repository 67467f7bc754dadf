"""Where a rank is, told to the others once in a while: when it does not arrive, they can say where it was last seen."""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from lockstep.core.entry_points import source_line_of

T = TypeVar("T")
SECONDS = 0.5  # between two signs of life


class Store(Protocol):
    """Where processes write down what the others have to know."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Whereabouts:
    """The phase and the step that this process is at."""

    def __init__(self) -> None:
        self.phase, self.step = "start", 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()

    def tell(self, store: Store, name: str) -> None:
        """From now on, writes them into the store under `name`, with the main thread's source line, on a thread."""
        self._thread = threading.Thread(target=self._tell, args=(store, name), daemon=True, name="lockstep-whereabouts")
        self._thread.start()

    def stop(self) -> None:
        """No more signs of life. The thread has to be over before the process ends."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _tell(self, store: Store, name: str) -> None:
        count = 0
        while not self._over.wait(SECONDS if count else 0):
            count += 1
            frame = sys._current_frames().get(self._main)
            said = {"count": count, "step": self.step, "phase": self.phase, "line": source_line_of(frame)}
            try:
                store.set(f"whereabouts/{name}", json.dumps(said))
            except RuntimeError:  # the store is gone, and so is the run
                return


def ask(question: Callable[[], T], seconds: float) -> T:
    """What a store answers, in time: on its own it waits for ever where the way to it is cut without a word."""
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


def look(store: Store, names: list[str]) -> list[dict[str, Any] | None]:
    """What each of them said last; None where nothing was said."""
    found: list[dict[str, Any] | None] = []
    for name in names:
        key = f"whereabouts/{name}"
        found.append(json.loads(store.get(key)) if store.check([key]) else None)
    return found


def find_late(store: Store, names: list[str], devices: list[str], own: int) -> tuple[list[int], str]:
    """The ranks that did not arrive where rank `own` waits, and for each where it was last seen, and if it is alive."""
    before = look(store, names)
    time.sleep(3 * SECONDS)
    now = look(store, names)
    here = now[own] or {"step": 0}
    late, sentences = [], []
    for rank, (then, said) in enumerate(zip(before, now, strict=True)):
        if rank == own:
            continue
        who = f"rank {rank} ({devices[rank]})"
        if said is None:
            late.append(rank)
            sentences.append(f"{who} has never been heard of")
            continue
        is_silent = then is not None and then["count"] == said["count"]
        # who writes a checkpoint is expected to take its time
        is_behind = (said["step"], said["phase"] in ("exchange", "checkpoint")) < (here["step"], True)
        if is_silent or is_behind:
            at = f", at {said['line']}" if said["line"] else ""
            how = "it gives no sign of life" if is_silent else "it is alive"
            late.append(rank)
            sentences.append(f"{who} is in {said['phase']} of step {said['step']}{at}; {how}")
    return late, "; ".join(sentences)
