"""Settings of the whole process, which one run at a time may change."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.core.errors import BackendError

_LOCKS: dict[str, threading.Lock] = {}


@contextmanager
def one_at_a_time(framework: str) -> Iterator[None]:
    """Refuses a second run in this process with the same framework."""
    lock = _LOCKS.setdefault(framework, threading.Lock())
    if not lock.acquire(blocking=False):
        raise BackendError(
            f"Another run is under way in this process, and {framework}'s settings are process-wide. "
            "Wait for it to end, or use another process."
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable; restored on exit."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
