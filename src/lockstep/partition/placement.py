"""Who holds which part of the model, and who updates it."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from lockstep.partition.grid import Grid


class Part(NamedTuple):
    """What one rank holds: some stages of the network, and of their layers its share of the slices."""

    stages: tuple[int, ...] = (0,)
    num_stages: int = 1
    layer_rank: int = 0  # its number among the ranks that share the layers of its stages
    num_layer_ranks: int = 1
    owner: int = 0  # its number among the ranks that share the update of its part
    num_owners: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole model."""
        return self.num_stages == 1 and self.num_layer_ranks == 1


class Placement(NamedTuple):
    """The part of each rank. Ranks with the same part are replicas of each other.

    >>> Placement(Grid(data=2, network=2), stages=(0, 1)).owners
    [0, 1]
    """

    grid: Grid
    stages: tuple[int, ...] = (0,)  # for each stage of the network, its place in a pipeline
    shards_update: bool = False  # the replicas of a part share its update, and the optimizer's state

    def part_of(self, rank: int) -> Part:
        """What a rank holds."""
        at, num_stages = self.grid.at(rank), len(self.stages)
        own = tuple(stage for stage, place in enumerate(self.stages) if place == at.network)
        owner = (at.data, self.grid.data) if self.shards_update else (0, 1)
        return Part(own, num_stages, at.layers, self.grid.layers, *owner)

    @property
    def owners(self) -> list[int]:
        """The first rank of each part: together they hold all."""
        return list(range(self.grid.num_parts))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.grid.num_parts == 1

    @property
    def every_rank_has_all(self) -> bool:
        """Whether that is so for the optimizer's state, too."""
        return self.is_replicated and not self.shards_update


def owned_ranges(sizes: Sequence[int], num_owners: int) -> list[range]:
    """Contiguous ranges of parameters with these sizes, one for each owner, of about as many entries each.

    A parameter is updated by one owner. Its middle decides which.

    >>> owned_ranges([4, 4, 8], num_owners=2)
    [range(0, 2), range(2, 3)]
    """
    total, ends = max(1, sum(sizes)), [0, *accumulate(sizes)]
    middles = [(ends[number] + ends[number + 1]) / 2 for number in range(len(sizes))]
    owners = [min(num_owners - 1, int(middle * num_owners / total)) for middle in middles]
    starts = [sum(owner < number for owner in owners) for number in range(num_owners + 1)]
    return [range(starts[number], starts[number + 1]) for number in range(num_owners)]
