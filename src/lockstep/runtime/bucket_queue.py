"""Buckets of a gradient that backward has filled, for the thread that exchanges them while backward goes on.

Backward goes from the last parameter to the first, so buckets come from the end of the flat vector.
"""

from collections.abc import Callable, Sequence
from queue import SimpleQueue

from lockstep.backends import RecordEvent, Tensor
from lockstep.runtime.transport import Cancelled


class BucketQueue:
    """The buckets of the last leaf of a rank, in the order of `ranges`."""

    def __init__(self, ranges: Sequence[range]) -> None:
        self.ranges = ranges
        self._num_ready = 0
        self._ready: SimpleQueue[tuple[Tensor, Callable[[], None]] | None] = SimpleQueue()

    def on_ready(self, gradient: Tensor, start: int, record_event: RecordEvent) -> None:
        """The gradient is complete from entry `start` on, once the event that can be recorded now has passed."""
        while self._num_ready < len(self.ranges) and self.ranges[self._num_ready].start >= start:
            self._num_ready += 1
            self._ready.put((gradient, record_event()))

    def finish(self, gradient: Tensor) -> None:
        """Backward is over, and the device has done all of it."""
        self.on_ready(gradient, 0, nothing_to_wait_for)

    def wait(self) -> Tensor:
        """The gradient, when the next bucket of it is there."""
        ready = self._ready.get()
        if ready is None:
            raise Cancelled
        gradient, wait_for_event = ready
        wait_for_event()
        return gradient

    def cancel(self) -> None:
        """No more buckets will come."""
        self._ready.put(None)


def nothing_to_wait_for() -> Callable[[], None]:
    """The event of what is done already."""
    return lambda: None
