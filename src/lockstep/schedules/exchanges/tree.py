"""`tree`: additions happen where the tree puts them; few rounds and no bottleneck, but whole vectors.

A sum is made by the rank that holds its left part; the holder of the right part sends it there. The total is broadcast
by doubling: one rank has it, then two, then four.
"""

from collections import defaultdict
from collections.abc import Sequence

from lockstep.schedules.exchanges.collective import Addition, Collective, Round, Transfer, own_nodes
from lockstep.schedules.reduction_tree import Node, children, missing_sums


def tree(ranges: Sequence[range]) -> Collective:
    """About log2(k) rounds up the tree, and log2(k) rounds to broadcast the total."""
    num_ranks, num_shards = len(ranges), sum(map(len, ranges))
    holder = {node: rank for rank, own in enumerate(own_nodes(ranges)) for node in own}
    made_in = dict.fromkeys(holder, 0)  # the round after which a node is there
    transfers, additions = defaultdict(list), defaultdict(list)
    for node in missing_sums(set(holder), num_shards):
        left, right = children(node)
        holder[node] = holder[left]
        made_in[node] = 1 + max(made_in[left], made_in[right])
        if holder[right] != holder[left]:
            transfers[made_in[node]].append(Transfer(holder[right], holder[left], 0, right))
        additions[made_in[node]].append(Addition(holder[left], 0, left, right))

    total = Node(0, num_shards)
    reduce = [Round(tuple(transfers[i]), tuple(additions[i])) for i in range(1, made_in[total] + 1)]
    return Collective(1, (*reduce, *broadcast(total, holder[total], num_ranks)), (total,))


def broadcast(node: Node, root: int, num_ranks: int) -> list[Round]:
    """Rounds that get `node` from rank `root` to all: each rank that has it sends it to one more in every round."""
    rounds, num_have = [], 1
    while num_have < num_ranks:
        pairs = [(i, i + num_have) for i in range(min(num_have, num_ranks - num_have))]
        rounds.append(Round(tuple(Transfer((root + s) % num_ranks, (root + t) % num_ranks, 0, node) for s, t in pairs)))
        num_have *= 2
    return rounds
