"""The gradients and sums that a rank holds during a step, by what was added and which entries there are of it."""

from lockstep.backends import Backend, Pieces, Tensor, flat
from lockstep.schedules.instructions import Partial
from lockstep.schedules.reduction_tree import Node


class HeldValues:
    """Values of one rank. A gradient may be in pieces until somebody needs it, or a part of it, as a vector."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._found: dict[Node, list[tuple[range, Tensor | Pieces]]] = {}

    def copy(self) -> "HeldValues":
        """The same values; what is added to one of the two is not in the other."""
        copied = HeldValues(self._backend)
        copied._found = {node: list(values) for node, values in self._found.items()}
        return copied

    def hold(self, value: Partial, tensor: Tensor | Pieces) -> None:
        """From now on `value` is held."""
        self._found.setdefault(value.node, []).append((value.entries, tensor))

    def vector(self, value: Partial) -> Tensor:
        """A value that is held, or that more is held of."""
        start, stop = value.entries.start, value.entries.stop
        values = self._found[value.node]
        for at, (entries, found) in enumerate(values):
            if entries.start <= start and stop <= entries.stop:
                tensor = flat(found)
                values[at] = entries, tensor
                if entries == value.entries:
                    return tensor
                return self._backend.chunk(tensor, start - entries.start, stop - entries.start)
        raise KeyError(value)

    def pieces(self, value: Partial) -> Pieces | None:
        """The same, if it is in pieces."""
        for entries, found in self._found[value.node]:
            if entries == value.entries and isinstance(found, Pieces):
                return found
        return None

    def drop(self, value: Partial) -> None:
        """Nobody needs it any more: its memory is free."""
        kept = [(entries, tensor) for entries, tensor in self._found[value.node] if entries != value.entries]
        self._found[value.node] = kept

    def clear(self) -> None:
        """Drops all."""
        self._found.clear()
