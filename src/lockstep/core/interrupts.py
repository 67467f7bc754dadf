"""Ctrl-C and SIGTERM: the run stops after the step under way. A second one ends it at once.

The second one is a KeyboardInterrupt wherever the program is, because it may be in code that never ends. Who looks at
`count` again and again needs none (`raises=False`): raised in a destructor or in `os.fork`, it would be lost.

Where one is entered inside another, both get the signal.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Self

from lockstep.core.notebook_kernel import in_notebook

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is entered in the main thread, `requested` is whether the run is to stop, `count` how often."""

    def __init__(
        self, notify: bool = False, signals: Sequence[signal.Signals] = SIGNALS, *, raises: bool = True
    ) -> None:
        self._notify, self._signals, self._raises, self.count = notify, signals, raises, 0

    @property
    def requested(self) -> bool:
        """Whether there was any signal."""
        return self.count > 0

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        handled = [number for number in self._signals if is_main and signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._received) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 and self._raises:
            raise KeyboardInterrupt
        if self._notify and self.count == 1:
            self._show_note()
        outer = getattr(self._before.get(signal.Signals(number)), "__self__", None)
        if isinstance(outer, Interrupts):
            outer._received(number, frame)

    def _show_note(self) -> None:
        if in_notebook():  # a cell's standard error may be written to at any time
            print("stopping after this step; interrupt again to end it now", file=sys.stderr, flush=True)
            return
        with contextlib.suppress(OSError):  # not `print`: the signal may have come while that was writing
            os.write(2, b"\nstopping after this step; press Ctrl-C again to end it now\n")


@contextlib.contextmanager
def undone_when_terminated() -> Iterator[None]:
    """SIGTERM ends the program as `sys.exit` does, so that what was begun is undone; by itself it would end it at once.

    Torchrun sends one to all ranks when one of them has failed, and these may not have come further than that one.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the undoing
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
