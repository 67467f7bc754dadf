"""A gradient as one flat vector that backward fills, so that parts of it can leave before it is complete."""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.backends.protocol import Ready
from lockstep.core.layout import Layout


class Filling:
    """The gradient of one shard. Parameters come in any order; `ready` is told how far it is complete from its end."""

    def __init__(self, layout: Layout, place: torch.device, ready: Ready) -> None:
        self.vector = torch.empty(layout.size, dtype=torch.float32, device=place)
        pieces = self.vector.split(layout.pieces)
        self._pieces, self._missing = pieces[::2], set(range(len(layout.names)))
        for gap in pieces[1::2]:
            if len(gap):
                gap.zero_()
        self._starts = [piece.storage_offset() for piece in self._pieces]
        self._first = len(self._pieces)  # from this parameter on, all are there
        self._ready, self._place = ready, place
        self._wait_for_earlier = self._mark()  # what was computed before may be on another stream than backward's
        self.is_told = False  # whether somebody was told of a part

    def put(self, number: int, gradient: Tensor) -> bool:
        """Takes the gradient of a parameter, flat; False if it was there already."""
        if number not in self._missing:
            return False
        self._pieces[number].copy_(gradient)
        self._missing.discard(number)
        if number == self._first - 1:
            while self._first and self._first - 1 not in self._missing:
                self._first -= 1
            self.is_told = True
            self._ready(self.vector, self._starts[self._first], self._both)
        return True

    def complete(self) -> Tensor:
        """The whole vector, when backward is over: parameters that did not come have no gradient."""
        for number in self._missing:
            self._pieces[number].zero_()
        return self.vector

    def _both(self) -> Callable[[], None]:
        wait = self._mark()

        def wait_for_both() -> None:
            self._wait_for_earlier()
            wait()

        return wait_for_both

    def _mark(self) -> Callable[[], None]:
        if self._place.type == "cpu":
            return lambda: None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._place))
        synchronize: Callable[[], None] = event.synchronize
        return synchronize
