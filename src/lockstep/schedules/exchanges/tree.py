"""`tree`: the additions happen where the tree puts them; few rounds and no hub, but whole vectors.

A sum is made by the rank that holds its left part; the holder of the right part sends it there. The total goes
back by doubling: one rank has it, then two, then four.
"""

from collections import defaultdict
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


def tree(ranges: Sequence[range]) -> Collective:
    """About log2(k) rounds up the tree, and log2(k) rounds of doubling to hand the total out."""
    num_ranks, num_shards = len(ranges), sum(map(len, ranges))
    holder = {node: rank for rank, held in enumerate(own_nodes(ranges)) for node in held}
    ready = dict.fromkeys(holder, 0)  # the round after which a node is there
    transfers, additions = defaultdict(list), defaultdict(list)
    for node in missing_sums(set(holder), num_shards):
        left, right = children(node)
        holder[node] = holder[left]
        ready[node] = 1 + max(ready[left], ready[right])
        if holder[right] != holder[left]:
            transfers[ready[node]].append(Transfer(holder[right], holder[left], 0, right))
        additions[ready[node]].append(Addition(holder[left], 0, left, right))

    total = Node(0, num_shards)
    up = [Round(tuple(transfers[i]), tuple(additions[i])) for i in range(1, ready[total] + 1)]
    return Collective(1, without_empty_rounds(up + doubling(holder[total], num_ranks, total)), (total,))


def doubling(root: int, num_ranks: int, node: Node) -> list[Round]:
    """Rounds that hand `node` from rank `root` to all: each rank that has it serves one more in every round."""
    rounds, num_served = [], 1
    while num_served < num_ranks:
        pairs = [(i, i + num_served) for i in range(min(num_served, num_ranks - num_served))]
        rounds.append(Round(tuple(Transfer((root + s) % num_ranks, (root + t) % num_ranks, 0, node) for s, t in pairs)))
        num_served *= 2
    return rounds
