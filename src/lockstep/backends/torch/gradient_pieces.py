"""The gradient of a shard as backward leaves it: a tensor for each parameter, in float32 or in bf16.

Where shards are only added up, it never has to become one vector: a kernel for each parameter reads the tensors of all
shards and writes their sum, in the order of the tree, into one.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lockstep.backends.protocol import Pieces
from lockstep.backends.torch.kernels.nvrtc import add_gradients, is_aligned
from lockstep.backends.torch.large_vectors import empty_vector
from lockstep.core.layout import Layout

Piece: TypeAlias = Tensor | tuple[Tensor, ...] | None  # a gradient, one in parts that are to be added, or none


class GradientPieces(Pieces):
    """Flat tensors in the order of the layout; None where a parameter has no gradient, which counts as zeros."""

    def __init__(self, layout: Layout, pieces: Sequence[Piece], device: torch.device) -> None:
        self._layout, self._device = layout, device
        self.pieces = [tuple(map(_aligned, parts_of(piece))) for piece in pieces]

    def flat(self) -> Tensor:
        vector, views = self._empty()
        found = list(zip(views, self.pieces, strict=True))
        if empty := [view for view, parts in found if not parts]:
            torch._foreach_zero_(empty)
        if filled := [(view, parts[0]) for view, parts in found if parts]:
            torch._foreach_copy_([view for view, _ in filled], [piece for _, piece in filled])
        for view, parts in found:
            for other in parts[1:]:
                view.add_(other)
        return vector

    def can_add(self, num_addends: int) -> bool:
        return num_addends == 2 or self._device.type == "cuda"

    def added(self, brackets: str, others: Sequence[Pieces]) -> Tensor:
        addends = [self.pieces, *(other.pieces for other in others if isinstance(other, GradientPieces))]
        vector, views = self._empty()
        for number, view in enumerate(views):
            pieces = [addend[number] for addend in addends]
            if self._device.type == "cuda":
                add_gradients(brackets, view, pieces)
            else:
                left, right = (_sum_of(parts, view) for parts in pieces)
                torch.add(left, right, out=view)
        return vector

    def _empty(self) -> tuple[Tensor, Sequence[Tensor]]:
        """A vector whose gaps are zero, and a view of each parameter's part."""
        vector = empty_vector(self._layout.size, self._device)
        split = vector.split(self._layout.pieces)
        if gaps := [gap for gap in split[1::2] if len(gap)]:
            torch._foreach_zero_(gaps)
        return vector, split[::2]


def parts_of(piece: Piece) -> tuple[Tensor, ...]:
    """The tensors that a gradient is the sum of; none: it is zero."""
    if piece is None:
        return ()
    return piece if isinstance(piece, tuple) else (piece,)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if is_aligned(tensor) else tensor.clone()


def _sum_of(parts: tuple[Tensor, ...], like: Tensor) -> Tensor:
    if not parts:
        return torch.zeros_like(like)
    first = parts[0].to(like.dtype)
    return first if len(parts) == 1 else first + parts[1]
