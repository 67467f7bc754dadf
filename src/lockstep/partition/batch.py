"""A batch into shards: the unit of work, whatever the number of devices."""

from itertools import pairwise

from lockstep.core.errors import ConfigError


def even_ranges(num_items: int, num_parts: int) -> list[range]:
    """`num_parts` ranges one after the other that cover all items; sizes differ by at most one, larger ones first.

    >>> even_ranges(10, 4)
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    >>> [len(part) for part in even_ranges(2, 4)]
    [1, 1, 0, 0]
    """
    if num_parts < 1:
        raise ConfigError(f"{num_items} items cannot be cut into {num_parts} parts. Ask for 1 or more.")
    size, rest = divmod(num_items, num_parts)
    starts = [part * size + min(part, rest) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def split_into_shards(num_samples: int, num_shards: int) -> list[range]:
    """The shards of a batch that hold samples: `num_shards` of them, or fewer if the batch is that small.

    Empty shards are the last ones, and the tree of the first n shards is a part of the tree of all (see
    `schedules/reduction_tree.py`), so leaving them out changes no addition.

    >>> split_into_shards(5, num_shards=2)
    [range(0, 3), range(3, 5)]
    """
    return [shard for shard in even_ranges(num_samples, num_shards) if shard]
