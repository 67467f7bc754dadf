"""A vector on its way through a schedule's rounds, between processes.

It is cut into parts, which go through the rounds one behind the other: while one is added up, the next is on the wire.
What arrives is written to where it is needed, in memory that is there from the step before.
"""

import torch
from torch import Tensor

from lockstep.engines.group import Group
from lockstep.exchange.nodes import Node
from lockstep.exchange.schedule import Schedule
from lockstep.split.batch import part_ranges

PART = 1 << 20  # numbers in a part: 4 MB, a few of which fit into a cache


class Wire:
    """Exchanges vectors of one size by one schedule, again and again; each total is overwritten by the next."""

    def __init__(self, group: Group, schedule: Schedule, size: int) -> None:
        self._group = group
        place = group.place
        self._total = torch.empty(size, dtype=torch.float32, device=place)
        num_parts = -(-size // PART) if group.can_overlap else 1
        self._parts = [
            Part(group, schedule, place_in_vector, self._total[place_in_vector.start : place_in_vector.stop], number)
            for number, place_in_vector in enumerate(part_ranges(size, num_parts))
        ]

    def total(self, nodes: dict[Node, Tensor]) -> Tensor:
        """The sum of all ranks' nodes, from this rank's."""
        for part in self._parts:
            part.begin(nodes)
        under_way = self._parts
        while under_way:
            under_way = [part for part in under_way if part.go_on()]
        return self._total


class Part:
    """A part of the vector, cut into the schedule's chunks."""

    def __init__(self, group: Group, schedule: Schedule, where: range, total: Tensor, number: int) -> None:
        self._group, self._rounds, self._number = group, schedule.rounds, number
        self._start = where.start
        self._places = part_ranges(len(where), schedule.num_chunks)
        totals = [total[place.start : place.stop] for place in self._places]
        self._totals = {(chunk, node): totals[chunk] for chunk, node in enumerate(schedule.totals)}
        self._others: dict[tuple[int, Node], Tensor] = {}  # memory for nodes that are no total
        self._held: dict[tuple[int, Node], Tensor] = {}
        self._round = 0

    def begin(self, nodes: dict[Node, Tensor]) -> None:
        """Starts the first round with this rank's nodes."""
        self._held, self._round = {}, 0
        for node, vector in nodes.items():
            for chunk, place in enumerate(self._places):
                own = vector[self._start + place.start : self._start + place.stop]
                if (chunk, node) in self._totals:  # nobody else has shards
                    own = self._totals[chunk, node].copy_(own)
                self._held[chunk, node] = own
        self._send()

    def go_on(self) -> bool:
        """Finishes a round and starts the next; False when there is none."""
        if self._round == len(self._rounds):
            return False
        self._group.finish(self._number)
        rank = self._group.rank
        for addition in self._rounds[self._round].additions:
            if addition.rank == rank:
                chunk = addition.chunk
                left, right = self._held[chunk, addition.left], self._held[chunk, addition.right]
                self._held[chunk, addition.node] = torch.add(left, right, out=self._memory(chunk, addition.node))
        self._round += 1
        if self._round == len(self._rounds):
            return False
        self._send()
        return True

    def _send(self) -> None:
        if not self._rounds:
            return
        rank, transfers = self._group.rank, self._rounds[self._round].transfers
        mine = [t for t in transfers if self._places[t.chunk]]
        sends = [(t.target, self._held[t.chunk, t.node]) for t in mine if t.source == rank]
        receives = [(t.source, self._memory(t.chunk, t.node)) for t in mine if t.target == rank]
        for transfer in transfers:
            if transfer.target == rank:
                key = transfer.chunk, transfer.node
                self._held[key] = self._memory(*key)
        self._group.begin(self._number, sends, receives)

    def _memory(self, chunk: int, node: Node) -> Tensor:
        """Where a node's chunk is written to."""
        if (chunk, node) in self._totals:
            return self._totals[chunk, node]
        if (chunk, node) not in self._others:
            size = len(self._places[chunk])
            self._others[chunk, node] = torch.empty(size, dtype=torch.float32, device=self._group.place)
        return self._others[chunk, node]
