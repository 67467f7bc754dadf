"""Gradients leave as they become ready: the vector is cut into parts, and a part is exchanged when it is complete.

Backward goes from the last parameter to the first, so parts are numbered from the end of the vector. While early layers
are still in backward, a thread beside the rank's own takes the parts through the rounds of the exchange.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from lockstep.backends import Backend, Mark, Tensor
from lockstep.schedules.reduction_tree import Node

Nodes = dict[Node, Tensor]  # of a part: those that one rank can add up alone


class WayOut(NamedTuple):
    """How one rank's gradients leave."""

    places: Sequence[range]  # of the parts, from the last to the first
    leave: Callable[[int, Callable[[], Nodes]], None]  # part number n leaves; its nodes can be asked for from now on


class Departures:
    """The parts of a rank's gradient that have left so far, for the thread that exchanges them."""

    def __init__(self) -> None:
        self._left: list[Callable[[], Nodes]] = []
        self._num_left = threading.Semaphore(0)
        self._is_cancelled = False

    def leave(self, number: int, nodes: Callable[[], Nodes]) -> None:
        """Part number `number` leaves. They come in their order."""
        assert number == len(self._left), "parts leave from the end of the vector on"
        self._left.append(nodes)
        self._num_left.release()

    def wait_for(self, number: int) -> Nodes:
        """The nodes of a part, when it has left; asked for in their order."""
        self._num_left.acquire()
        if self._is_cancelled:
            raise threading.BrokenBarrierError
        nodes, self._left[number] = self._left[number], dict
        return nodes()

    def cancel(self) -> None:
        """Nothing leaves any more: sends home who waits."""
        self._is_cancelled = True
        self._num_left.release()


class LastLeaf:
    """The last of a rank's leaves completes its nodes, part after part."""

    def __init__(self, backend: Backend, way_out: WayOut, nodes: Nodes, last: Node, beside: Sequence[Tensor]) -> None:
        """`last` is the node that the leaf belongs to, `beside` the sums of what comes before the leaf there."""
        self._backend, self._way_out = backend, way_out
        self._nodes, self._last, self._beside = nodes, last, beside
        self._num_left = 0

    def ready(self, vector: Tensor, start: int, mark: Mark) -> None:
        """The leaf is complete from `start` on, once what `mark()` gives has been waited for."""
        while self._num_left < len(self._way_out.places) and self._way_out.places[self._num_left].start >= start:
            place = self._way_out.places[self._num_left]
            self._way_out.leave(self._num_left, partial(self._nodes_of, place, vector, mark()))
            self._num_left += 1

    def _nodes_of(self, place: range, vector: Tensor, wait: Callable[[], None]) -> Nodes:
        wait()

        def cut(whole: Tensor) -> Tensor:
            return self._backend.chunk(whole, place.start, place.stop)

        total = cut(vector)
        for left in reversed(self._beside):
            total = self._backend.add(cut(left), total)
        return {**{node: cut(whole) for node, whole in self._nodes.items()}, self._last: total}
