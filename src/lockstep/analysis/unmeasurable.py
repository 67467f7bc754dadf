"""What cannot be measured, in a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.core.errors import ConfigError, Interrupted, RunError, first_line


@contextmanager
def cannot_be_measured(what: str = "The model") -> Iterator[None]:
    """An error of the user's model, or data, becomes a sentence about it: nothing has been started yet."""
    try:
        yield
    except Interrupted:
        raise
    except RunError as problem:
        raise ConfigError(f"{what} cannot be measured: {first_line(problem).rstrip('.')}.") from problem
