"""The gradients and sums that a rank has during a step, by what was added and which entries there are of it."""

from lockstep.backends import Backend, Pieces, Tensor, flat
from lockstep.schedules.instructions import Partial
from lockstep.schedules.reduction_tree import Node


class PartialSums:
    """Values of one rank. A gradient may be in pieces until somebody needs it, or a part of it, as a vector."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tensors: dict[Node, list[tuple[range, Tensor | Pieces]]] = {}

    def copy(self) -> "PartialSums":
        """The same values; what is put into one of the two is not in the other."""
        copied = PartialSums(self._backend)
        copied._tensors = {node: list(values) for node, values in self._tensors.items()}
        return copied

    def put(self, value: Partial, tensor: Tensor | Pieces) -> None:
        """Keeps the tensor of `value`."""
        self._tensors.setdefault(value.node, []).append((value.entries, tensor))

    def vector(self, value: Partial) -> Tensor:
        """The tensor of `value`, or its part of a longer one."""
        start, stop = value.entries.start, value.entries.stop
        values = self._tensors[value.node]
        for at, (entries, kept) in enumerate(values):
            if entries.start <= start and stop <= entries.stop:
                tensor = flat(kept)
                values[at] = entries, tensor
                if entries == value.entries:
                    return tensor
                return self._backend.chunk(tensor, start - entries.start, stop - entries.start)
        raise KeyError(value)

    def pieces(self, value: Partial) -> Pieces | None:
        """The same, if it is in pieces."""
        for entries, kept in self._tensors[value.node]:
            if entries == value.entries and isinstance(kept, Pieces):
                return kept
        return None

    def drop(self, value: Partial) -> None:
        """Nobody needs it any more: its memory is free."""
        self._tensors[value.node] = [one for one in self._tensors[value.node] if one[0] != value.entries]

    def clear(self) -> None:
        """Drops all."""
        self._tensors.clear()
