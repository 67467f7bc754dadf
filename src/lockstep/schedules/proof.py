"""Executes a schedule on symbols instead of vectors: is the sum the tree's on every rank, and can anybody deadlock?

Every wait here is the strictest that a transport may have: a send is complete only when its receiver has started the
same group, and groups of a rank in one communicator (that of a channel, or of one cut) are complete in the order in
which it started them. What an instruction waits for never becomes untrue again, and nothing is competed for. So if one
order of progress reaches the end, every order does, and transports that wait for less do too.

Where layers are split, forward and backward passes are collectives of the ranks that share them: all must be at the
same one. What these exchange within it is proved in `tests/parallel/test_tensor.py`.
"""

from collections import Counter
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

from lockstep.schedules.instructions import (
    Activation,
    ActivationGradient,
    Add,
    AllGather,
    AllReduce,
    Backward,
    Communicate,
    Evaluate,
    Forward,
    ForwardBackward,
    GatherNorms,
    Instruction,
    Parameters,
    Partial,
    Schedule,
    Update,
    Value,
    Wait,
    WaitForBackward,
    communicator_of,
)
from lockstep.schedules.reduction_tree import Node, sum_of, sum_with_brackets

Expression = Any  # a shard number, or a pair of expressions: which numbers are added, in which brackets
Group = tuple[int, int]  # number and round, in a channel
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
    parts = schedule.parts()
    for rank, total in enumerate(run.totals):
        updated = sorted(run.updated[rank], key=lambda entries: entries.start)
        if [entry for entries in updated for entry in entries] != list(schedule.programs[rank].entries):
            raise ScheduleError(f"rank {rank}: what was updated does not cover the vector: {updated}")
        same = run.totals[parts.index(parts[rank])]
        for number, (part, expression) in enumerate(total):
            if keeps_tree and expression != expected:
                raise ScheduleError(f"rank {rank}: {part} is {expression}, and the tree is {expected}")
            if not keeps_tree and expression != same[number][1]:
                raise ScheduleError(f"rank {rank}: {part} is {expression}, and another sum on rank 0")
            if not keeps_tree and rank == 0 and Counter(shards_in(expression)) != Counter(range(schedule.num_shards)):
                raise ScheduleError(f"{part} is {expression}: not every shard once")
    if keeps_tree and run.unused:
        rank, value = next(iter(run.unused))
        raise ScheduleError(f"rank {rank} receives {value}, and does not need it")
    return [expression for total in run.totals for _, expression in total]


def peak_activations(schedule: Schedule) -> list[int]:
    """For each rank, how many shards have gone through its stage and not come back, at most."""
    run = SymbolicRun(schedule)
    for _ in run.order():
        pass
    return run.peaks


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


class JoinStreams(NamedTuple):
    """Between the two streams of a rank whose exchange overlaps: the end of the exchange, and the wait for it."""

    waits: bool


class Held(NamedTuple):
    """A part of a node that a rank holds."""

    entries: range
    expression: Expression
    received: Partial | None  # as which it came from another rank


class SymbolicRun:
    """A step under way: every rank has one stream, or two where the exchange overlaps."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, ranks = schedule, range(len(schedule.programs))
        self._parts = schedule.parts()
        self.totals: list[list[tuple[Partial, Expression]]] = [[] for _ in ranks]
        self.updated: list[list[range]] = [[] for _ in ranks]  # entries that have their new values
        self.unused: set[tuple[int, Value]] = set()  # (rank, what it has received and not used)
        self.peaks = [0 for _ in ranks]  # shards under way in a stage
        self._held: list[dict[Node, list[Held]]] = [{} for _ in ranks]
        self._activations: list[set[Activation | ActivationGradient]] = [set() for _ in ranks]
        self._in_flight: list[set[tuple[int, int]]] = [set() for _ in ranks]  # shards and stages
        self._groups: dict[tuple[int, str], list[Communicate]] = {}  # of a rank and a communicator, in their order
        self._at: list[dict[tuple[str, Group], int]] = [{} for _ in ranks]  # where in that order a group is
        self._num_complete: Counter[tuple[int, str]] = Counter()  # of these groups, from the first on
        self._sent: list[set[tuple[str, Group, Value, int]]] = [set() for _ in ranks]
        self._arrived: dict[Any, set[int]] = {}  # the ranks that are at a collective, or past it
        self._has_exchanged: set[int] = set()
        self._pairs: dict[tuple[int, int], Expression] = {}

    def pair(self, left: Expression, right: Expression) -> Expression:
        """(left + right); equal expressions are one object, so that comparing them is fast."""
        return self._pairs.setdefault((id(left), id(right)), (left, right))

    def order(self) -> Iterator[tuple[int, Instruction]]:
        """Executes instructions until all are done, and gives each with its rank."""
        streams = [(rank, stream) for rank in range(len(self.totals)) for stream in self._streams(rank)]
        position = [0] * len(streams)
        moved = True
        while moved:
            moved = False
            for number, (rank, stream) in enumerate(streams):
                while position[number] < len(stream) and self._can_continue(rank, stream[position[number]]):
                    instruction = stream[position[number]]
                    if isinstance(instruction, JoinStreams):
                        self._has_exchanged.add(rank)
                    else:
                        self._execute(rank, instruction)
                        yield rank, instruction
                    position[number] += 1
                    moved = True
        stuck = [(rank, stream[at]) for (rank, stream), at in zip(streams, position, strict=True) if at < len(stream)]
        if stuck:
            raise ScheduleError(f"deadlock: {'; '.join(f'rank {rank} waits at {at}' for rank, at in stuck)}")

    def _streams(self, rank: int) -> list[list[Any]]:
        compute, exchange, update, _ = self._schedule.programs[rank]
        if not self._schedule.overlaps:
            return [[*compute, *exchange, *update]]
        return [[*compute, JoinStreams(waits=True), *update], [*exchange, JoinStreams(waits=False)]]

    def _can_continue(self, rank: int, instruction: Any) -> bool:
        match instruction:
            case WaitForBackward(leaf):
                return leaf.node in self._held[rank]
            case Wait(number, round_, channel):
                communicator = communicator_of(channel, round_)
                return self._at[rank][communicator, (number, round_)] < self._num_complete[rank, communicator]
            case AllGather() | GatherNorms() | AllReduce():
                which = instruction.total if isinstance(instruction, AllReduce) else type(instruction)
                return self._all_are_at(which, rank, range(len(self.totals)))
            case ForwardBackward() | Forward() | Backward() | Evaluate():
                group = self._schedule.layer_group(rank)
                return self._all_are_at((group, type(instruction), instruction), rank, group)
            case JoinStreams(waits):
                return not waits or rank in self._has_exchanged
        return True

    def _all_are_at(self, collective: Any, rank: int, ranks: range) -> bool:
        arrived = self._arrived.setdefault(collective, set())
        arrived.add(rank)
        return len(arrived) == len(ranks)

    def _execute(self, rank: int, instruction: Instruction) -> None:
        match instruction:
            case ForwardBackward(shards):
                for shard in shards:
                    self._hold(rank, Partial(Node(shard, 1), self._schedule.programs[rank].entries), shard)
            case Forward(shard, stage) | Evaluate(shard, stage):
                if stage > 0:
                    self._take(rank, Activation(shard, stage - 1))
                self._activations[rank].add(Activation(shard, stage))
                if isinstance(instruction, Forward):
                    self._in_flight[rank].add((shard, stage))
                    self.peaks[rank] = max(self.peaks[rank], len(self._in_flight[rank]))
            case Backward(shard, stage, _):
                if (shard, stage) not in self._in_flight[rank]:
                    raise ScheduleError(f"rank {rank} takes shard {shard} back before it went forward")
                if stage < len(self._schedule.stages) - 1:
                    self._take(rank, ActivationGradient(shard, stage))
                self._in_flight[rank].remove((shard, stage))
                self._activations[rank].discard(Activation(shard, stage))
                self._activations[rank].add(ActivationGradient(shard, stage - 1))
                self._hold(rank, Partial(Node(shard, 1), instruction.entries), shard)
            case Add(total, parts):
                self._hold(rank, total, sum_with_brackets([self._value(rank, part) for part in parts], self.pair))
            case Communicate(number, round_, sends, _, channel):
                for value, target in sends:
                    self._check_held(rank, value, target)
                    self._sent[rank].add((channel, (number, round_), value, target))
                self._start(rank, instruction)
            case Wait(number, round_, channel):
                communicator = communicator_of(channel, round_)
                group = self._groups[rank, communicator][self._at[rank][communicator, (number, round_)]]
                for value, source in group.receives:
                    if (channel, (number, round_), value, rank) not in self._sent[source]:
                        raise ScheduleError(f"rank {rank} waits for {value}, which rank {source} does not send")
                    self._receive(rank, value, source)
            case AllReduce(total):
                programs = self._schedule.programs
                own = [(r, i) for r, p in enumerate(programs) for i in p.exchange if isinstance(i, AllReduce)]
                values = [self._value(r, part) for r, i in own if i.total == total for part in i.parts]
                self._hold(rank, total, reduce(self.pair, values))
            case Update(total_parts):
                self.totals[rank] = [(part, self._value(rank, part)) for part in total_parts]
                self.updated[rank] += [part.entries for part in total_parts]

    def _start(self, rank: int, group: Communicate) -> None:
        """Starts a group. It is complete when its peers have started it, and what each of them started before is."""
        communicator = communicator_of(group.channel, group.round)
        started = self._groups.setdefault((rank, communicator), [])
        self._at[rank][communicator, (group.number, group.round)] = len(started)
        started.append(group)
        ranks = [rank]
        while ranks:
            rank = ranks.pop()
            started = self._groups.get((rank, communicator), [])
            while self._num_complete[rank, communicator] < len(started):
                group = started[self._num_complete[rank, communicator]]
                key, peers = (communicator, (group.number, group.round)), peers_of(group)
                if not all(
                    self._at[peer].get(key, INFINITY) <= self._num_complete[peer, communicator] for peer in peers
                ):
                    break
                self._num_complete[rank, communicator] += 1
                ranks += peers

    def _receive(self, rank: int, value: Value, source: int) -> None:
        """What the source has sent is here; it has to be needed."""
        if isinstance(value, Parameters):
            self.updated[rank].append(value.entries)
            return
        if isinstance(value, Partial):
            if self._parts[rank] != self._parts[source]:
                raise ScheduleError(f"rank {rank} holds another part of the model than rank {source}")
            found = Held(value.entries, self._value(source, value), value)
            self._held[rank].setdefault(value.node, []).append(found)
        else:
            self._activations[rank].add(value)
        self.unused.add((rank, value))

    def _check_held(self, rank: int, value: Value, target: int) -> None:
        """What is sent has to be there."""
        if isinstance(value, Partial):
            self._value(rank, value)
        elif isinstance(value, Parameters):
            if value.entries not in self.updated[rank]:
                raise ScheduleError(f"rank {rank} sends {value} to rank {target} before it has updated them")
        elif value not in self._activations[rank]:
            raise ScheduleError(f"rank {rank} does not hold {value}")

    def _take(self, rank: int, value: Activation | ActivationGradient) -> None:
        """A value that nobody needs once more."""
        if value not in self._activations[rank]:
            raise ScheduleError(f"rank {rank} does not hold {value}")
        self._activations[rank].remove(value)
        self.unused.discard((rank, value))

    def _hold(self, rank: int, value: Partial, expression: Expression) -> None:
        self._held[rank].setdefault(value.node, []).append(Held(value.entries, expression, None))

    def _value(self, rank: int, value: Partial) -> Expression:
        for held in self._held[rank].get(value.node, ()):
            if held.entries.start <= value.entries.start and value.entries.stop <= held.entries.stop:
                if held.received is not None:
                    self.unused.discard((rank, held.received))
                return held.expression
        raise ScheduleError(f"rank {rank} does not hold {value}")
