"""A thread that works for one rank. It does not keep the program from ending, should it hang."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from lockstep.core.errors import LockstepError
from lockstep.core.this_thread import THIS_THREAD

T = TypeVar("T")


class RankThread:
    """Does what it is given, one after the other."""

    def __init__(self, name: str, rank: int = 0) -> None:
        self._rank = rank
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Gives it something to do."""
        future: Future[Any] = Future()
        self._tasks.put((future, work, arguments))
        return future

    def end(self, waits: bool = True) -> None:
        """Ends the thread when it has done what it was given."""
        self._tasks.put(None)
        if waits:
            self.thread.join()

    def _run(self) -> None:
        THIS_THREAD.rank = self._rank
        while (given := self._tasks.get()) is not None:
            future, work, arguments = given
            try:
                future.set_result(work(*arguments))
            except BaseException as problem:
                future.set_exception(problem)
            del given, future, work, arguments  # they hold tensors


def run_watched(name: str, work: Callable[[], T], watch: Callable[[], None]) -> T:
    """What `work` gives, in a thread of its own; meanwhile `watch` is called again and again, and may give up on it."""
    thread = RankThread(name)
    future = thread.submit(work)
    thread.end(waits=False)
    try:
        while not future.done():
            watch()
    except LockstepError as problem:
        problem.ends_at_once = True  # the thread still works
        raise
    return cast(T, future.result())
