"""Child processes that end with their parent, and do not deadlock in their garbage collector."""

import contextlib
import ctypes
import gc
import os
import signal


def die_with(parent: int) -> None:
    """Makes the system end this process when its parent ends, however that happens (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def fork() -> int:
    """`os.fork`, where the child does not delete what was garbage in the parent.

    Some objects join a thread of their own when they are deleted. The child has no such thread: it would wait for ever.
    """
    gc.collect()
    gc.freeze()
    process = os.fork()
    if process:
        gc.unfreeze()
    return process
