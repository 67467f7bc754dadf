"""A gradient as one flat vector that backward fills, so that its buckets can be exchanged before it is complete."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lockstep.backends.protocol import OnReady
from lockstep.core.layout import Layout


class GradientVector:
    """The gradient of one shard. It is filled in any order; `on_ready` learns how far it is complete from its end."""

    def __init__(self, layout: Layout, device: torch.device, on_ready: OnReady) -> None:
        self.vector = torch.empty(layout.size, dtype=torch.float32, device=device)
        pieces = self.vector.split(layout.pieces)
        self._pieces, self._missing = pieces[::2], set(range(len(layout.names)))
        for gap in pieces[1::2]:
            if len(gap):
                gap.zero_()
        self._starts = [piece.storage_offset() for piece in self._pieces]
        self._first = len(self._pieces)  # from this parameter on it is complete
        self._on_ready, self._device = on_ready, device
        self._wait_for_earlier = self._record_event()  # forward may have used another stream
        self.is_shared = False  # whether `on_ready` was called

    def put(self, number: int, gradient: Tensor) -> bool:
        """Stores the gradient of a parameter, flat; False if it has one already."""
        if number not in self._missing:
            return False
        self._pieces[number].copy_(gradient)
        self._missing.discard(number)
        if number == self._first - 1:
            while self._first and self._first - 1 not in self._missing:
                self._first -= 1
            self.is_shared = True
            self._on_ready(self.vector, self._starts[self._first], self._record_both)
        return True

    def complete(self) -> Tensor:
        """The whole vector, after backward; zeros for parameters without a gradient."""
        for number in self._missing:
            self._pieces[number].zero_()
        return self.vector

    def _record_both(self) -> Callable[[], None]:
        wait = self._record_event()

        def wait_for_both() -> None:
            self._wait_for_earlier()
            wait()

        return wait_for_both

    def _record_event(self) -> Callable[[], None]:
        if self._device.type == "cpu":
            return lambda: None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        synchronize: Callable[[], None] = event.synchronize
        return synchronize


@cache
def gaps_of(layout: Layout, device: torch.device) -> list[Tensor]:
    """The zeros after each parameter."""
    return _for_all_streams([torch.zeros(size, device=device) for size in layout.pieces[1::2]])


@cache
def one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient of the loss: kept, as every shard needs it."""
    return _for_all_streams([torch.ones((), dtype=dtype, device=device)])[0]


def _for_all_streams(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors, once they are filled: any stream may read them."""
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return tensors
