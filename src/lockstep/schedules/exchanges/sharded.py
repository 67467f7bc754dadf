"""`sharded`, the default and the text's third exercise: a reduce-scatter and an all-gather, in the tree's order.

Rank r receives chunk r of everybody's nodes, completes the tree for that chunk, and sends it to all. Where every rank's
shards are one node, each sends and receives 2(k-1)/k of the vector, and none of them is a bottleneck; a rank with two
nodes sends both in the reduce-scatter. A ring sends as little, but cannot keep the order of additions.
"""

from collections.abc import Sequence

from lockstep.schedules.exchanges.collective import Addition, Collective, Round, Transfer, own_nodes
from lockstep.schedules.reduction_tree import Node, children, missing_sums


def sharded(ranges: Sequence[range]) -> Collective:
    """Chunk r of all nodes to rank r, which completes the tree for it; the chunk's total back to all."""
    num_shards, nodes = sum(map(len, ranges)), own_nodes(ranges)
    ranks, known = range(len(ranges)), {node for own in nodes for node in own}
    total = Node(0, num_shards)
    reduce_scatter = Round(
        tuple(Transfer(s, t, t, node) for t in ranks for s in ranks if s != t for node in nodes[s]),
        tuple(Addition(t, t, *children(node)) for t in ranks for node in missing_sums(known, num_shards)),
    )
    missing = [rank for rank in ranks if total not in nodes[rank]]  # a rank may have all shards
    all_gather = Round(tuple(Transfer(s, t, s, total) for t in missing for s in ranks if s != t))
    return Collective(len(ranks), (reduce_scatter, all_gather), (total,) * len(ranks))
