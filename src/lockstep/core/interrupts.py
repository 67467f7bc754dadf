"""Ctrl-C and SIGTERM: the run stops after the step under way. A second one ends it at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is entered in the main thread, `requested` is whether the run is to stop."""

    def __init__(self, notify: bool = False, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._notify, self._signals, self.requested = notify, signals, False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        handled = [number for number in self._signals if is_main and signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._received) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._notify:
            with contextlib.suppress(OSError):  # not `print`: the signal may have come while that was writing
                os.write(2, b"\nstopping after this step; press Ctrl-C again to end it now\n")
