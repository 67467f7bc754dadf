"""Executes a schedule on symbols instead of vectors: is the sum the tree's on every rank, and can anybody deadlock?

Every wait here is the strictest that a transport may have: a send is complete only when its receiver has started the
same group, and groups of a rank are complete in the order in which it started them. What an instruction waits for
never becomes untrue again, and no two lanes compete for anything. So if one order of progress reaches the end, every
order does, and transports that wait for less do too.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

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


def prove(schedule: Schedule, keeps_tree: bool = True) -> None:
    """Raises `ScheduleError` unless every rank updates with every shard's gradient, in the tree's brackets.

    An exchange that does not keep the tree has to add every shard exactly once, in the same order on all ranks.
    """
    run = SymbolicRun(schedule)
    for _ in run.order():
        pass
    expected = sum_of(Node(0, schedule.num_shards), leaf=lambda shard: shard, add=run.pair)
    for rank, total in enumerate(run.totals):
        if total is None:
            raise ScheduleError(f"rank {rank} never updates")
        entries = [entry for part, _ in total for entry in (part.entries.start, part.entries.stop)]
        inner = entries[1:-1]
        if [entries[0], entries[-1]] != [schedule.entries.start, schedule.entries.stop] or inner[::2] != inner[1::2]:
            raise ScheduleError(f"rank {rank}: the parts of the total do not cover the vector: {total}")
        for number, (part, expression) in enumerate(total):
            if keeps_tree and expression != expected:
                raise ScheduleError(f"rank {rank}: {part} is {expression}, and the tree is {expected}")
            if not keeps_tree and expression != run.totals[0][number][1]:  # type: ignore[index]
                raise ScheduleError(f"rank {rank}: {part} is {expression}, and another sum on rank 0")
            if not keeps_tree and rank == 0 and Counter(shards_in(expression)) != Counter(range(schedule.num_shards)):
                raise ScheduleError(f"{part} is {expression}: not every shard once")


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


class SymbolicRun:
    """A step under way: every rank has one lane, or two where the exchange overlaps."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        num_ranks = len(schedule.programs)
        self.totals: list[list[tuple[Partial, Expression]] | None] = [None] * num_ranks
        self._held: list[dict[Node, list[tuple[range, Expression]]]] = [{} for _ in range(num_ranks)]
        self._started: list[list[Communicate]] = [[] for _ in range(num_ranks)]  # groups, in their order
        self._sent: list[set[tuple[int, int, Partial, int]]] = [set() for _ in range(num_ranks)]
        self._at: list[dict[Group, int]] = [{} for _ in range(num_ranks)]  # where in that order a group is
        self._num_complete = [0] * num_ranks  # of these groups, from the first on
        self._has_gathered = [False] * num_ranks
        self._has_reduced: list[Expression | None] = [None] * num_ranks
        self._exchange_is_over = [False] * num_ranks
        self._pairs: dict[tuple[int, int], Expression] = {}

    def pair(self, left: Expression, right: Expression) -> Expression:
        """(left + right); equal expressions are one object, so that comparing them is fast."""
        key = id(left), id(right)
        if key not in self._pairs:
            self._pairs[key] = (left, right)
        return self._pairs[key]

    def order(self) -> Iterator[tuple[int, Instruction]]:
        """Executes instructions until all are done, and gives each with its rank."""
        lanes = [(rank, lane) for rank in range(len(self.totals)) for lane in self._lanes(rank)]
        position = [0] * len(lanes)
        moved = True
        while moved:
            moved = False
            for number, (rank, lane) in enumerate(lanes):
                while position[number] < len(lane) and self._can_go_on(rank, lane[position[number]]):
                    instruction = lane[position[number]]
                    if isinstance(instruction, _Join):
                        self._exchange_is_over[rank] |= not instruction.waits
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
        return [[*compute, _Join(waits=True), *update], [*exchange, _Join(waits=False)]]

    def _can_go_on(self, rank: int, instruction: Any) -> bool:
        match instruction:
            case WaitForBackward(leaf):
                return leaf.node in self._held[rank]
            case Wait(bucket, round_):
                return self._at[rank][bucket, round_] < self._num_complete[rank]
            case AllReduce():
                if self._has_reduced[rank] is None:
                    self._has_reduced[rank] = self._own_sum(rank, instruction)
                return all(own is not None for own in self._has_reduced)
            case Update():
                return all(self._has_gathered)
            case _Join(waits):
                return not waits or self._exchange_is_over[rank]
        return True

    def _start(self, rank: int, group: Communicate) -> None:
        """Starts a group. It is complete when its peers have started it, and what each of them started before is."""
        self._at[rank][group.bucket, group.round] = len(self._started[rank])
        self._started[rank].append(group)
        ranks = [rank]
        while ranks:
            rank = ranks.pop()
            while self._num_complete[rank] < len(self._started[rank]):
                group = self._started[rank][self._num_complete[rank]]
                key, peers = (group.bucket, group.round), peers_of(group)
                if not all(self._at[peer].get(key, INFINITY) <= self._num_complete[peer] for peer in peers):
                    break
                self._num_complete[rank] += 1
                ranks += peers

    def _execute(self, rank: int, instruction: Instruction) -> None:
        held = self._held[rank]
        match instruction:
            case ForwardBackward(shards):
                for shard in shards:
                    held[Node(shard, 1)] = [(self._schedule.entries, shard)]
            case AllGather():
                self._has_gathered[rank] = True
            case Add(total, parts):
                expression = sum_with_brackets([self._value(rank, part) for part in parts], self.pair)
                held.setdefault(total.node, []).append((total.entries, expression))
            case Communicate(sends=sends):
                for value, target in sends:
                    self._value(rank, value)  # it has to be there
                    self._sent[rank].add((instruction.bucket, instruction.round, value, target))
                self._start(rank, instruction)
            case Wait(bucket, round_):
                for value, source in self._started[rank][self._at[rank][bucket, round_]].receives:
                    if (bucket, round_, value, rank) not in self._sent[source]:
                        raise ScheduleError(f"rank {rank} waits for {value}, which rank {source} does not send")
                    held.setdefault(value.node, []).append((value.entries, self._value(source, value)))
            case AllReduce(total, _):
                sums = [own for own in self._has_reduced if own != ()]
                expression = sums[0]
                for own in sums[1:]:
                    expression = self.pair(expression, own)
                held[total.node] = [(total.entries, expression)]
            case Update(total):
                self.totals[rank] = [(part, self._value(rank, part)) for part in total]

    def _own_sum(self, rank: int, instruction: AllReduce) -> Expression:
        own: Expression = ()
        for part in instruction.parts:
            value = self._value(rank, part)
            own = value if own == () else self.pair(own, value)
        return own

    def _value(self, rank: int, value: Partial) -> Expression:
        for entries, expression in self._held[rank].get(value.node, ()):
            if entries.start <= value.entries.start and value.entries.stop <= entries.stop:
                return expression
        raise ScheduleError(f"rank {rank} does not hold {value}")


class _Join:
    """Between lanes of a rank: the end of the exchange, and the wait for it."""

    __match_args__ = ("waits",)

    def __init__(self, waits: bool) -> None:
        self.waits = waits
