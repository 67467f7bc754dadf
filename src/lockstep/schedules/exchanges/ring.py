"""`ring`: each rank talks to its right neighbour only, one chunk a round, twice around.

The least traffic a link can have, the choice of most systems, and an order of additions of its own: chunk c is
added up starting at rank c. So it depends on k, and **does not keep the bits**; it is here to compare with.
"""

from collections.abc import Sequence
from functools import reduce

from lockstep.schedules.exchanges.collective import Addition, Collective, Round, Transfer, own_nodes
from lockstep.schedules.reduction_tree import Node


def ring(ranges: Sequence[range]) -> Collective:
    """Once around to reduce-scatter (chunk c ends on rank c-1), once around to all-gather."""
    num_ranks, nodes = len(ranges), own_nodes(ranges)
    ranks = range(num_ranks)

    local: list[Addition] = []  # round 0: each rank adds its own nodes up, first to last
    for rank, held in enumerate(nodes):
        for chunk in ranks if held else ():
            reduce(lambda left, right: _added(local, Addition(rank, chunk, left, right)), held)
    own = [Node(held[0].first, sum(n.num_leaves for n in held)) if held else None for held in nodes]

    rounds = [Round(additions=tuple(local))]
    sums: list[Node | None] = list(own)  # of each chunk so far: chunk c starts at rank c
    for step in range(num_ranks - 1):
        transfers: list[Transfer] = []
        additions: list[Addition] = []
        for chunk, node in enumerate(sums):
            source, target = (chunk + step) % num_ranks, (chunk + step + 1) % num_ranks
            if node is None:  # the ranks so far have no shard
                sums[chunk] = own[target]
                continue
            transfers.append(Transfer(source, target, chunk, node))
            mine = own[target]
            if mine is not None:
                sums[chunk] = _added(additions, Addition(target, chunk, node, mine))
        rounds.append(Round(tuple(transfers), tuple(additions)))

    totals = tuple(node for node in sums if node is not None)
    rounds += [  # chunk c is complete on rank c-1 and goes around once more
        Round(tuple(Transfer((c - 1 + step) % num_ranks, (c + step) % num_ranks, c, totals[c]) for c in ranks))
        for step in range(num_ranks - 1)
    ]
    return Collective(num_ranks, tuple(rounds), totals)


def _added(additions: list[Addition], addition: Addition) -> Node:
    additions.append(addition)
    return addition.node
