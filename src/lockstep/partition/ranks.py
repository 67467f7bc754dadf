"""Shards to ranks: each rank works on one contiguous range of shards, which may be empty."""

from lockstep.partition.batch import even_ranges


def split_over_ranks(num_shards: int, num_ranks: int) -> list[range]:
    """The shards of each rank: ranges whose lengths differ by at most one, longer ones first.

    >>> split_over_ranks(8, num_ranks=3)
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    return even_ranges(num_shards, num_ranks)
