"""What goes wrong on a rank: named by rank, device, phase and the user's source line."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.core.device import Device
from lockstep.core.errors import LockstepError, RankError
from lockstep.core.source_lines import user_source_line
from lockstep.runtime.engine import Position
from lockstep.runtime.out_of_memory import OutOfMemoryCause, is_out_of_memory
from lockstep.runtime.transport import Cancelled


@contextmanager
def errors_named(
    rank: int, device: Device, position: Position, cancel: Callable[[], None] | None = None
) -> Iterator[None]:
    """An error names the rank and the phase that it was in; `cancel` wakes those who wait for it."""
    try:
        yield
    except BaseException as problem:
        if cancel is not None:
            cancel()
        if isinstance(problem, (LockstepError, Cancelled)) or not isinstance(problem, (Exception, SystemExit)):
            raise
        raise RankError(rank, device, position.phase, problem, user_source_line(problem)) from problem


@contextmanager
def out_of_memory_explained(to_error: Callable[[OutOfMemoryCause], Exception]) -> Iterator[None]:
    """A full memory becomes the error that `to_error` makes of it, once what was computed is gone."""
    try:
        yield
        return
    except BaseException as problem:
        if not is_out_of_memory(problem):
            raise
        cause = OutOfMemoryCause(problem)
    raise to_error(cause)


def is_timeout(problem: RuntimeError) -> bool:
    """Whether an error of a connection is one of time: Gloo, NCCL and their stores have no type of its own for it.

    >>> [is_timeout(RuntimeError(text)) for text in ("Application timeout caused pair closure", "CUDA runtime error")]
    [True, False]
    """
    return re.search(r"\btime(d |-| )?out", str(problem), re.IGNORECASE) is not None
