"""An all-reduce as plain data: rounds of transfers and additions, and what each rank does in them.

A rank holds nodes (partial sums, see `reduction_tree.py`), each cut into `num_chunks` chunks. In a round every transfer
reads what its source held when the round began; then each rank does its additions, in order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.partition.batch import even_ranges
from lockstep.schedules.instructions import Add, Communicate, Instruction, Partial, Receive, Send, Wait
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


class Collective(NamedTuple):
    """Who sends what to whom, until each rank holds every chunk of the total."""

    num_chunks: int
    rounds: tuple[Round, ...]
    totals: tuple[Node, ...]  # for each chunk, the node that is the total (the ring's do not start at leaf 0)

    def instructions(
        self,
        rank: int,
        buckets: Sequence[range],
        prepare: Callable[[range], list[Instruction]],
        ranks: Sequence[int],
        first_bucket: int = 0,
    ) -> list[Instruction]:
        """What number `rank` of `ranks` does to all-reduce every bucket. `prepare` makes a bucket's own nodes first.

        While a bucket is communicated, the next ones are started: see `pipelined`.
        """
        own = [_own_part(round_, rank) for round_ in self.rounds]
        chunks = [chunks_of(bucket, self.num_chunks) for bucket in buckets]
        found: list[Instruction] = []
        for bucket, number in pipelined(len(buckets), len(own)):
            if number == 0:
                found += prepare(buckets[bucket])
            else:
                found += _end(own[number - 1], first_bucket + bucket, number - 1, chunks[bucket])
            if number < len(own):
                found += _start(own[number], rank, ranks, (first_bucket + bucket, number), chunks[bucket])
        return found

    def total_of(self, buckets: Sequence[range]) -> tuple[Partial, ...]:
        """The parts of the total, in the order of their entries."""
        parts = [
            Partial(self.totals[number], chunk)
            for bucket in buckets
            for number, chunk in enumerate(chunks_of(bucket, self.num_chunks))
            if chunk
        ]
        return tuple(sorted(parts, key=lambda part: part.entries.start))


def _own_part(round_: Round, rank: int) -> Round:
    """What one rank has to do with a round."""
    return Round(
        tuple(transfer for transfer in round_.transfers if rank in (transfer.source, transfer.target)),
        tuple(addition for addition in round_.additions if addition.rank == rank),
    )


def _start(
    own: Round, rank: int, ranks: Sequence[int], group: tuple[int, int], chunks: list[range]
) -> list[Instruction]:
    transfers = [t for t in own.transfers if chunks[t.chunk]]
    sends = tuple(Send(Partial(t.node, chunks[t.chunk]), ranks[t.target]) for t in transfers if t.source == rank)
    receives = tuple(Receive(Partial(t.node, chunks[t.chunk]), ranks[t.source]) for t in transfers if t.target == rank)
    return [Communicate(*group, sends, receives)] if transfers else []


def _end(own: Round, bucket: int, number: int, chunks: list[range]) -> list[Instruction]:
    wait: list[Instruction] = [Wait(bucket, number)] if any(chunks[t.chunk] for t in own.transfers) else []
    return wait + [
        Add(Partial(a.node, entries), (Partial(a.left, entries), Partial(a.right, entries)))
        for a in own.additions
        if (entries := chunks[a.chunk])
    ]


def chunks_of(entries: range, num_chunks: int) -> list[range]:
    """A range of entries in `num_chunks` parts, of which some may be empty."""
    return [entries[part.start : part.stop] for part in even_ranges(len(entries), num_chunks)]


def own_nodes(ranges: Sequence[range]) -> list[list[Node]]:
    """For each rank, the nodes that it holds before the exchange: the maximal ones of its shards."""
    num_shards = sum(map(len, ranges))
    return [maximal_nodes(shards, num_shards) for shards in ranges]


def pipelined(num_buckets: int, num_rounds: int) -> list[tuple[int, int]]:
    """(bucket, round) in the one order in which every rank starts them; the round after the last one is the end.

    While a bucket waits for others, the next two are started. All ranks keep to this order, so there is no deadlock.

    >>> pipelined(num_buckets=3, num_rounds=1)
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    """
    both = [(bucket, round_) for bucket in range(num_buckets) for round_ in range(num_rounds + 1)]
    return sorted(both, key=lambda entry: (entry[0] + 2 * entry[1], entry[1]))
