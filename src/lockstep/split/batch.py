"""A batch into shards: the unit of work, whatever the number of devices."""

from typing import NamedTuple

from lockstep.errors import ConfigError


class Shard(NamedTuple):
    """Samples `start` to `stop` (exclusive) of a batch."""

    number: int
    start: int
    stop: int


def part_sizes(num_samples: int, num_parts: int) -> list[int]:
    """The sizes of `num_parts` parts that differ by at most one, larger ones first. Every sample is in one.

    >>> part_sizes(10, 4)
    [3, 3, 2, 2]
    >>> part_sizes(2, 4)
    [1, 1, 0, 0]
    """
    if num_parts < 1:
        raise ConfigError(f"{num_samples} samples cannot be cut into {num_parts} parts. Ask for 1 or more.")
    size, rest = divmod(num_samples, num_parts)
    return [size + (i < rest) for i in range(num_parts)]


def split_into_shards(num_samples: int, num_shards: int) -> list[Shard]:
    """The shards of a batch that hold samples: `num_shards` of them, or fewer if the batch is that small.

    Empty shards are the last ones, and the tree of the first n shards is a part of the tree of all (see
    `exchange/nodes.py`), so leaving them out changes no addition.

    >>> split_into_shards(5, num_shards=2)
    [Shard(number=0, start=0, stop=3), Shard(number=1, start=3, stop=5)]
    """
    shards, start = [], 0
    for number, size in enumerate(part_sizes(num_samples, num_shards)):
        if size:
            shards.append(Shard(number, start, start + size))
        start += size
    return shards
