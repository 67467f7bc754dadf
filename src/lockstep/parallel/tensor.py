"""Splitting layers: a layer is always computed as T slices of its output units, whoever computes them.

A rank holds a contiguous range of slices of every layer. It computes their outputs, and all-gathers those of the
others. On the way back it has, for each of its slices, a gradient of the layer's input; these are added in one fixed
tree over slice numbers, as the gradients of shards are: a rank adds up what it can alone, and all complete the rest.
What cannot be sliced is computed by every rank.

Ranks that share layers take the same shards through the model at the same time: the schedule is that of the other
splits, and every `ForwardBackward`, `Forward`, `Backward` and `Evaluate` is a collective of theirs.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from lockstep.partition.batch import even_ranges
from lockstep.schedules.reduction_tree import Node, children, maximal_nodes, missing_sums


class LayerShare(NamedTuple):
    """What one rank does for a layer of `num_slices` slices."""

    num_ranks: int  # that share the layer
    slices: range  # that it holds
    nodes: tuple[Node, ...]  # partial sums over its slices, that it sends to the others
    sums: tuple[tuple[Node, Node, Node], ...]  # what it adds then: the sum, and its two sides


def slice_name(name: str, number: int, num_slices: int) -> str:
    """The name of a slice of a parameter. It begins and ends like the parameter's own, by which users make groups.

    >>> slice_name("fc1.bias", 1, 4)
    'fc1.[1/4]bias'
    """
    layer, dot, short = name.rpartition(".")
    return f"{layer}{dot}[{number}/{num_slices}]{short}"


def unsliced_name(name: str) -> str:
    """The name of the parameter that a slice is of, as the user knows it.

    >>> unsliced_name("fc1.[1/4]bias")
    'fc1.bias'
    """
    return re.sub(r"\[\d+/\d+\]", "", name)


@lru_cache(maxsize=256)
def layer_shares(num_slices: int, num_ranks: int) -> tuple[LayerShare, ...]:
    """What each of the ranks that share a layer does; one that comes after the last slice has none.

    >>> layer_shares(4, 2)[1].nodes
    (Node(first=2, num_leaves=2),)
    """
    owned = even_ranges(num_slices, num_ranks)
    nodes = [tuple(maximal_nodes(own, num_slices)) for own in owned]
    known = {node for of_rank in nodes for node in of_rank}
    sums = tuple((node, *children(node)) for node in missing_sums(known, num_slices))
    return tuple(LayerShare(num_ranks, own, held, sums) for own, held in zip(owned, nodes, strict=True))
