"""`sharded`, the default and the text's third exercise: each rank adds up another part of the vector.

Rank r collects chunk r of everybody's nodes, completes the tree for that chunk, and hands it to all. Every
device sends and receives 2(k-1)/k of the vector, however many there are, and none of them is a hub. The order of
additions is the tree's, which a ring cannot offer for the same traffic.
"""

from collections.abc import Sequence

from lockstep.schedules.exchanges.collective import (
    Addition,
    Collective,
    Round,
    Transfer,
    own_nodes,
    without_empty_rounds,
)
from lockstep.schedules.reduction_tree import Node, children, missing_sums


def sharded(ranges: Sequence[range]) -> Collective:
    """Chunk r of all nodes to rank r, which completes the tree for it; the chunk's total back to all."""
    num_ranks, num_shards, nodes = len(ranges), sum(map(len, ranges)), own_nodes(ranges)
    known = {node for held in nodes for node in held}
    total = Node(0, num_shards)
    everyone = range(num_ranks)
    collect = Round(
        tuple(Transfer(s, t, t, node) for t in everyone for s in everyone if s != t for node in nodes[s]),
        tuple(Addition(t, t, *children(node)) for t in everyone for node in missing_sums(known, num_shards)),
    )
    hand_out = Round(tuple(Transfer(s, t, s, total) for t in everyone for s in everyone if s != t))
    return Collective(num_ranks, without_empty_rounds([collect, hand_out]), (total,) * num_ranks)
