"""The offset of each parameter in one flat vector, and the hash of the parameters."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALIGNMENT = 16  # float32 entries, 64 bytes: a parameter starts on a cache line, so every replica runs the same kernels


@dataclass(frozen=True)
class Layout:
    """The names and shapes of the parameters, in model order, which decide where each one is in the flat vector.

    A parameter starts at a multiple of `ALIGNMENT`, and so does what would come after the last; the entries in between
    stay zero. So a parameter is always in whole vector registers, whichever others are in the vector: some libraries
    round differently in the rest of a loop.

    >>> layout = Layout(("W", "b"), ((3, 2), (2,)))
    >>> layout.pieces
    (6, 10, 2, 14)
    >>> layout.size
    32
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def pieces(self) -> tuple[int, ...]:
        """The sizes to split the flat vector by: parameter, gap, parameter, gap, ..."""
        sizes = [math.prod(shape) for shape in self.shapes]
        return tuple(piece for size in sizes for piece in (size, -size % ALIGNMENT))

    @property
    def size(self) -> int:
        """Entries of the flat vector, gaps included."""
        return sum(self.pieces)

    def flatten(self, arrays: list[Array]) -> Array:
        """The arrays as one flat float32 vector."""
        flat = np.zeros(self.size, np.float32)
        for piece, array in zip(self._views(flat), arrays, strict=True):
            piece[:] = array.reshape(-1)
        return flat

    def unflatten(self, flat: Array) -> list[Array]:
        """The parameters, each in its own shape; views of `flat`."""
        return [piece.reshape(shape) for piece, shape in zip(self._views(flat), self.shapes, strict=True)]

    def _views(self, flat: Array) -> list[Array]:
        return np.split(flat, np.cumsum(self.pieces)[:-1])[::2]


def layout_of(params: Mapping[str, Array]) -> Layout:
    """The layout of named parameters, in the mapping's order."""
    return Layout(tuple(params), tuple(tuple(array.shape) for array in params.values()))


def sha256_of(params: list[Array]) -> str:
    """SHA-256 over the parameters in model order, each as little-endian bytes, C order, in its logical shape.

    >>> sha256_of([np.zeros(2, np.float32)]) == hashlib.sha256(bytes(8)).hexdigest()
    True
    """
    digest = hashlib.sha256()
    for array in params:
        digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()
