"""A gradient is exchanged in buckets, so that one can be on its way while others are still computed, or added up."""

import math

from lockstep.partition.batch import even_ranges

BUCKET_MB = 8.0  # between two processes of one machine, smaller buckets took longer (`lockstep bench`)
MAX_BUCKETS = 1000


def bucket_ranges(entries: range, bucket_mb: float, num_ranks: int) -> tuple[range, ...]:
    """The buckets of these entries of the flat vector, from the end. One rank: one bucket.

    >>> bucket_ranges(range(10), bucket_mb=16e-6, num_ranks=2)
    (range(7, 10), range(4, 7), range(0, 4))
    """
    if num_ranks == 1 or not bucket_mb:
        return (entries,)
    num_buckets = min(math.ceil(len(entries) * 4e-6 / bucket_mb), MAX_BUCKETS)
    parts = even_ranges(len(entries), max(1, num_buckets))
    return tuple(entries[part.start : part.stop] for part in reversed(parts))
