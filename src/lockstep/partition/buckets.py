"""A vector is exchanged in parts, so that a part can be on its way while others are still computed, or added up."""

import math

from lockstep.partition.batch import part_ranges

BUCKET_MB = 8.0  # between two processes of one machine, smaller parts took longer (`lockstep bench`)
MAX_PARTS = 1000


def places_of_parts(size: int, bucket_mb: float, num_ranks: int) -> list[range]:
    """Where the parts of a vector of `size` numbers lie, from its end on. Nobody is in a hurry who is alone.

    >>> places_of_parts(10, bucket_mb=16e-6, num_ranks=2)
    [range(7, 10), range(4, 7), range(0, 4)]
    """
    if num_ranks == 1 or not bucket_mb:
        return [range(size)]
    num_parts = min(math.ceil(size * 4e-6 / bucket_mb), MAX_PARTS)
    return part_ranges(size, max(1, num_parts))[::-1]
