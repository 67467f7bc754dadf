"""Settings that belong to the whole process: one run at a time may change them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.core.errors import BackendError


@contextmanager
def one_at_a_time(lock: threading.Lock, framework: str) -> Iterator[None]:
    """Holds `lock`; refuses, instead of waiting, where another run holds it."""
    if not lock.acquire(blocking=False):
        raise BackendError(
            f"Another run is under way in this process, and {framework}'s settings are the whole process's. "
            "Wait for it to end, or use another process."
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable of the process's environment; afterwards it is as it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
