"""A vector on its way through a schedule's rounds, between processes.

Its parts go through the rounds one behind the other: while one is added up, the next is on the wire. What arrives is
written to where it is needed, in memory that is there from the step before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.runtime.process_group import Group
from lockstep.runtime.bucket_queue import Departures, Nodes, WayOut
from lockstep.schedules.reduction_tree import Node
from lockstep.schedules.exchanges.collective import Schedule, in_order
from lockstep.partition.batch import part_ranges
from lockstep.core.tracing import span


class Wire:
    """Exchanges vectors of one size by one schedule, again and again; each total is overwritten by the next."""

    def __init__(self, group: Group, schedule: Schedule, places: Sequence[range]) -> None:
        self._places = places
        self._total = torch.empty(sum(map(len, places)), dtype=torch.float32, device=group.place)
        self._parts = [
            Part(group, schedule, self._total[place.start : place.stop], number) for number, place in enumerate(places)
        ]
        self._order = in_order(len(places), len(schedule.rounds))
        self._departures = Departures()

    @property
    def is_beside(self) -> bool:
        """Whether parts leave before backward is over, so that another thread than the rank's own exchanges them."""
        return len(self._parts) > 1

    def start(self) -> WayOut:
        """How the next vector leaves."""
        self._departures = Departures()
        return WayOut(self._places, self._departures.leave)

    def travel(self) -> Tensor:
        """This rank's share in the exchange of all parts; gives the total."""
        departures = self._departures
        for number, round_ in self._order:
            nodes = departures.wait_for(number) if round_ == 0 else None
            with span("exchange"):
                if nodes is not None:
                    self._parts[number].begin(nodes)
                else:
                    self._parts[number].go_on(round_)
        return self._total

    def cancel(self) -> None:
        """Nothing leaves any more."""
        self._departures.cancel()


class Part:
    """A part of the vector, cut into the schedule's chunks."""

    def __init__(self, group: Group, schedule: Schedule, total: Tensor, number: int) -> None:
        self._group, self._rounds, self._number = group, schedule.rounds, number
        self._places = part_ranges(len(total), schedule.num_chunks)
        totals = [total[place.start : place.stop] for place in self._places]
        self._totals = {(chunk, node): totals[chunk] for chunk, node in enumerate(schedule.totals)}
        self._others: dict[tuple[int, Node], Tensor] = {}  # memory for nodes that are no total
        self._held: dict[tuple[int, Node], Tensor] = {}

    def begin(self, nodes: Nodes) -> None:
        """Starts the first round with this rank's nodes."""
        self._held = {}
        for node, vector in nodes.items():
            for chunk, place in enumerate(self._places):
                own = vector[place.start : place.stop]
                if (chunk, node) in self._totals:  # nobody else has shards
                    own = self._totals[chunk, node].copy_(own)
                self._held[chunk, node] = own
        self._send(0)

    def go_on(self, round_: int) -> None:
        """Finishes the round before and starts this one, if there is one."""
        self._group.finish(self._number)
        rank = self._group.rank
        for addition in self._rounds[round_ - 1].additions:
            if addition.rank == rank:
                chunk = addition.chunk
                left, right = self._held[chunk, addition.left], self._held[chunk, addition.right]
                self._held[chunk, addition.node] = torch.add(left, right, out=self._memory(chunk, addition.node))
        self._send(round_)

    def _send(self, round_: int) -> None:
        if round_ == len(self._rounds):
            self._held = {}
            return
        rank, transfers = self._group.rank, self._rounds[round_].transfers
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


class Native(Wire):
    """PyTorch's own all_reduce, in its own order of additions."""

    def __init__(self, group: Group, size: int) -> None:
        super().__init__(group, Schedule(1, (), (Node(0, 1),)), [range(size)])
        self._group = group

    def travel(self) -> Tensor:
        own = torch.zeros_like(self._total)
        for vector in self._departures.wait_for(0).values():
            own += vector
        with span("exchange"):
            return self._group.all_reduce(own)
