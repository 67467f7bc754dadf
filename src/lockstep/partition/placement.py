"""Who holds which part of the model: a range of the flat parameter vector for each rank."""

from typing import NamedTuple


class Placement(NamedTuple):
    """The part that each rank holds. Ranks with the same part are replicas of each other.

    >>> Placement.replicated(range(10), num_ranks=2).owners
    [0]
    >>> Placement((range(0, 6), range(6, 10), range(0, 6), range(6, 10))).owners  # two stages, two replicas of each
    [0, 1]
    """

    parts: tuple[range, ...]  # by rank

    @classmethod
    def replicated(cls, entries: range, num_ranks: int) -> "Placement":
        """Every rank holds everything, as where only the data is split."""
        return cls((entries,) * num_ranks)

    @property
    def owners(self) -> list[int]:
        """For each part, in the order of its entries, the first rank that holds it: together they hold all once."""
        first = {part: self.parts.index(part) for part in self.parts if part}
        return [first[part] for part in sorted(first, key=lambda part: part.start)]

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole model."""
        return len(set(self.parts)) == 1

    @property
    def ranks_with_all(self) -> list[int]:
        """The ranks that hold the whole model, and so can evaluate it alone."""
        stop = max(part.stop for part in self.parts)
        return [rank for rank, part in enumerate(self.parts) if part.start == 0 and part.stop == stop]

    def replicas(self) -> list[list[int]]:
        """For each part, in the order of its entries, the ranks that hold it, and have to be equal to the bit."""
        return [[rank for rank, part in enumerate(self.parts) if part == self.parts[o]] for o in self.owners]
