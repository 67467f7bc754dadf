"""What belongs to the thread that asks: whom it works for, and with what."""

import threading
from typing import Any


class ThisThread(threading.local):
    """Every thread has its own; these are the values before they are set."""

    rank: int = 0  # whose work it does
    keyed: Any = None  # the random numbers of the shard that it computes
    num_lent: int = 0  # how often it was lent another trainer's module


THIS_THREAD = ThisThread()
