"""Executes a schedule on symbols instead of vectors: is the sum the tree's on every rank, and can anybody deadlock?

Every wait here is the strictest that a transport may have: a send is complete only when its receiver has started the
same group, and groups of a rank are complete in the order in which it started them. What an instruction waits for
never becomes untrue again, and no two lanes compete for anything. So if one order of progress reaches the end, every
order does, and transports that wait for less do too. What layers exchange within `ForwardBackward` is not covered.
"""

from collections import Counter
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

from lockstep.schedules.instructions import (
    Add,
    AllGather,
    AllReduce,
    Communicate,
    ForwardBackward,
    Instruction,
    Partial,
    Schedule,
    Update,
    Wait,
    WaitForBackward,
)
from lockstep.schedules.reduction_tree import Node, sum_of, sum_with_brackets

Expression = Any  # a shard number, or a pair of expressions: which numbers are added, in which brackets
Group = tuple[int, int]  # bucket, round
INFINITY = 1 << 62


class ScheduleError(AssertionError):
    """A schedule that would deadlock, or adds up something else than it should."""


def prove(schedule: Schedule, keeps_tree: bool = True) -> list[Expression]:
    """The brackets in which each part of the total is added; raises `ScheduleError` unless they are those of the tree.

    An exchange that does not keep the tree has to add every shard exactly once, in the same order on all ranks.
    """
    run = SymbolicRun(schedule)
    for _ in run.order():
        pass
    expected = sum_of(Node(0, schedule.num_shards), leaf=lambda shard: shard, add=run.pair)
    for rank, total in enumerate(run.totals):
        covered = [entry for part, _ in total for entry in part.entries]
        if covered != list(schedule.entries):
            raise ScheduleError(f"rank {rank}: the parts of the total do not cover the vector: {total}")
        for number, (part, expression) in enumerate(total):
            if keeps_tree and expression != expected:
                raise ScheduleError(f"rank {rank}: {part} is {expression}, and the tree is {expected}")
            if not keeps_tree and expression != run.totals[0][number][1]:
                raise ScheduleError(f"rank {rank}: {part} is {expression}, and another sum on rank 0")
            if not keeps_tree and rank == 0 and Counter(shards_in(expression)) != Counter(range(schedule.num_shards)):
                raise ScheduleError(f"{part} is {expression}: not every shard once")
    return [expression for _, expression in run.totals[0]]


def one_thread_order(schedule: Schedule) -> list[tuple[int, Instruction]]:
    """(rank, instruction) in an order in which one thread can run all ranks without ever waiting."""
    return list(SymbolicRun(schedule).order())


def shards_in(expression: Expression) -> Iterator[int]:
    """The shard numbers in an expression."""
    if isinstance(expression, tuple):
        for side in expression:
            yield from shards_in(side)
    else:
        yield expression


def peers_of(group: Communicate) -> set[int]:
    """The ranks that a group sends to or receives from."""
    return {send.to for send in group.sends} | {receive.source for receive in group.receives}


class JoinLanes(NamedTuple):
    """Between the two lanes of a rank whose exchange overlaps: the end of the exchange, and the wait for it."""

    waits: bool


class SymbolicRun:
    """A step under way: every rank has one lane, or two where the exchange overlaps."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, ranks = schedule, range(len(schedule.programs))
        self.totals: list[list[tuple[Partial, Expression]]] = [[] for _ in ranks]
        self._held: list[dict[Node, list[tuple[range, Expression]]]] = [{} for _ in ranks]
        self._groups: list[list[Communicate]] = [[] for _ in ranks]  # that were started, in their order
        self._at: list[dict[Group, int]] = [{} for _ in ranks]  # where in that order a group is
        self._num_complete = [0 for _ in ranks]  # of these groups, from the first on
        self._sent: list[set[tuple[Group, Partial, int]]] = [set() for _ in ranks]
        self._arrived: dict[Any, set[int]] = {}  # the ranks that are at a collective, or past it
        self._has_exchanged: set[int] = set()
        self._pairs: dict[tuple[int, int], Expression] = {}

    def pair(self, left: Expression, right: Expression) -> Expression:
        """(left + right); equal expressions are one object, so that comparing them is fast."""
        return self._pairs.setdefault((id(left), id(right)), (left, right))

    def order(self) -> Iterator[tuple[int, Instruction]]:
        """Executes instructions until all are done, and gives each with its rank."""
        lanes = [(rank, lane) for rank in range(len(self.totals)) for lane in self._lanes(rank)]
        position = [0] * len(lanes)
        moved = True
        while moved:
            moved = False
            for number, (rank, lane) in enumerate(lanes):
                while position[number] < len(lane) and self._can_continue(rank, lane[position[number]]):
                    instruction = lane[position[number]]
                    if isinstance(instruction, JoinLanes):
                        self._has_exchanged.add(rank)
                    else:
                        self._execute(rank, instruction)
                        yield rank, instruction
                    position[number] += 1
                    moved = True
        stuck = [(rank, lane[at]) for (rank, lane), at in zip(lanes, position, strict=True) if at < len(lane)]
        if stuck:
            raise ScheduleError(f"deadlock: {'; '.join(f'rank {rank} waits at {at}' for rank, at in stuck)}")

    def _lanes(self, rank: int) -> list[list[Any]]:
        compute, exchange, update = self._schedule.programs[rank]
        if not self._schedule.overlaps:
            return [[*compute, *exchange, *update]]
        return [[*compute, JoinLanes(waits=True), *update], [*exchange, JoinLanes(waits=False)]]

    def _can_continue(self, rank: int, instruction: Any) -> bool:
        match instruction:
            case WaitForBackward(leaf):
                return leaf.node in self._held[rank]
            case Wait(bucket, round_):
                return self._at[rank][bucket, round_] < self._num_complete[rank]
            case AllGather() | AllReduce():
                which = instruction.total if isinstance(instruction, AllReduce) else AllGather
                self._arrived.setdefault(which, set()).add(rank)
                return len(self._arrived[which]) == len(self.totals)
            case JoinLanes(waits):
                return not waits or rank in self._has_exchanged
        return True

    def _execute(self, rank: int, instruction: Instruction) -> None:
        match instruction:
            case ForwardBackward(shards):
                for shard in shards:
                    self._hold(rank, Partial(Node(shard, 1), self._schedule.entries), shard)
            case Add(total, parts):
                self._hold(rank, total, sum_with_brackets([self._value(rank, part) for part in parts], self.pair))
            case Communicate(bucket, round_, sends, _):
                for value, target in sends:
                    self._value(rank, value)  # it has to be there
                    self._sent[rank].add(((bucket, round_), value, target))
                self._start(rank, instruction)
            case Wait(bucket, round_):
                for value, source in self._groups[rank][self._at[rank][bucket, round_]].receives:
                    if ((bucket, round_), value, rank) not in self._sent[source]:
                        raise ScheduleError(f"rank {rank} waits for {value}, which rank {source} does not send")
                    self._hold(rank, value, self._value(source, value))
            case AllReduce(total):
                programs = self._schedule.programs
                own = [(r, i) for r, p in enumerate(programs) for i in p.exchange if isinstance(i, AllReduce)]
                values = [self._value(r, part) for r, i in own if i.total == total for part in i.parts]
                self._hold(rank, total, reduce(self.pair, values))
            case Update(total_parts):
                self.totals[rank] = [(part, self._value(rank, part)) for part in total_parts]

    def _start(self, rank: int, group: Communicate) -> None:
        """Starts a group. It is complete when its peers have started it, and what each of them started before is."""
        self._at[rank][group.bucket, group.round] = len(self._groups[rank])
        self._groups[rank].append(group)
        ranks = [rank]
        while ranks:
            rank = ranks.pop()
            while self._num_complete[rank] < len(self._groups[rank]):
                group = self._groups[rank][self._num_complete[rank]]
                key, peers = (group.bucket, group.round), peers_of(group)
                if not all(self._at[peer].get(key, INFINITY) <= self._num_complete[peer] for peer in peers):
                    break
                self._num_complete[rank] += 1
                ranks += peers

    def _hold(self, rank: int, value: Partial, expression: Expression) -> None:
        self._held[rank].setdefault(value.node, []).append((value.entries, expression))

    def _value(self, rank: int, value: Partial) -> Expression:
        for entries, expression in self._held[rank].get(value.node, ()):
            if entries.start <= value.entries.start and value.entries.stop <= entries.stop:
                return expression
        raise ScheduleError(f"rank {rank} does not hold {value}")
