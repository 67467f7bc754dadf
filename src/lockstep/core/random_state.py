"""The caller's random numbers, which the import of a library must not use up: `rich` draws one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Puts Python's random numbers back to where they were."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
