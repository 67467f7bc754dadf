"""`gather`, the text's own all-reduce: a reduce to rank 0, which adds everything up, and a broadcast of the total.

Simple, and rank 0 is the bottleneck: (k-1) vectors in, (k-1) vectors out, through one device.
"""

from collections.abc import Sequence

from lockstep.schedules.exchanges.collective import Addition, Collective, Round, Transfer, own_nodes
from lockstep.schedules.reduction_tree import Node, children, missing_sums


def gather(ranges: Sequence[range]) -> Collective:
    """All nodes to rank 0, which completes the tree; the total back to all."""
    num_shards, nodes = sum(map(len, ranges)), own_nodes(ranges)
    known = {node for own in nodes for node in own}
    total = Node(0, num_shards)
    reduce = Round(
        tuple(Transfer(rank, 0, 0, node) for rank, own in enumerate(nodes) if rank for node in own),
        tuple(Addition(0, 0, *children(node)) for node in missing_sums(known, num_shards)),
    )
    broadcast = Round(tuple(Transfer(0, rank, 0, total) for rank in range(1, len(ranges))))
    return Collective(1, (reduce, broadcast), (total,))
