"""Child processes: made without a trap, and never to outlive their parent."""

import contextlib
import ctypes
import gc
import os
import signal


def die_with(parent: int) -> None:
    """Makes the system end this process when its parent ends, however that happens (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended in between
        os._exit(1)


def fork() -> int:
    """`os.fork`, where the child leaves alone what it inherits.

    Some objects wait for a thread of their own when they are deleted. In the child there is no such thread, so its
    garbage collector must not delete what was garbage in the parent: it would wait for ever.
    """
    gc.collect()
    gc.freeze()
    process = os.fork()
    if process:
        gc.unfreeze()
    return process
