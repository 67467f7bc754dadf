"""An exchange as plain data: rounds of transfers and additions.

The same object is run by the engines and proved right by a test that needs no framework.

A rank holds nodes (partial sums, see `nodes.py`), each cut into `num_chunks` chunks. In a round every transfer
reads what its source held when the round began; then each rank does its additions, in order.
"""

from typing import NamedTuple

from lockstep.schedules.reduction_tree import Node, maximal_nodes


class Transfer(NamedTuple):
    """Rank `source` gives rank `target` a copy of its `chunk` of `node`."""

    source: int
    target: int
    chunk: int
    node: Node


class Addition(NamedTuple):
    """Rank `rank` adds its `chunk` of `left` and of `right`, in this order."""

    rank: int
    chunk: int
    left: Node
    right: Node

    @property
    def node(self) -> Node:
        """What comes out: the leaves of `left`, then those of `right`."""
        return Node(self.left.first, self.left.num_leaves + self.right.num_leaves)


class Round(NamedTuple):
    """Transfers that happen at the same time, then additions."""

    transfers: tuple[Transfer, ...] = ()
    additions: tuple[Addition, ...] = ()


class Schedule(NamedTuple):
    """Who sends what to whom, until each rank holds every chunk of the total."""

    num_chunks: int
    rounds: tuple[Round, ...]
    totals: tuple[Node, ...]  # for each chunk, the node that is the total (the ring's do not start at leaf 0)


def own_nodes(ranges: list[range]) -> list[list[Node]]:
    """For each rank, the nodes that it holds before the exchange: the maximal ones of its shards."""
    num_shards = sum(map(len, ranges))
    return [maximal_nodes(shards, num_shards) for shards in ranges]


def in_order(num_parts: int, num_rounds: int) -> list[tuple[int, int]]:
    """(part, round) in the one order in which every rank begins them; the round after the last one is the end.

    While a part waits for others, the next two have begun. All ranks keep to this order, so none waits in a circle.

    >>> in_order(num_parts=3, num_rounds=1)
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    """
    both = [(part, round_) for part in range(num_parts) for round_ in range(num_rounds + 1)]
    return sorted(both, key=lambda entry: (entry[0] + 2 * entry[1], entry[1]))


def without_idle_rounds(rounds: list[Round]) -> tuple[Round, ...]:
    """The rounds in which something happens."""
    return tuple(r for r in rounds if r.transfers or r.additions)
