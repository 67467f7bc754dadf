"""A schedule on a clock: when each rank does what, if every instruction costs what it is said to cost.

Every rank goes through its program as the interpreter would: passes, additions and the update take time, sends take
none of the sender's, and whoever needs a value waits until it is there. Ranks on the same hardware slow each other
down while they compute at the same time. A sender's messages go over its link one after the other; a message arrives
its latency after the link was free again. An exchange that overlaps has a thread of its own, which takes no time from
the rank; a bucket is there when the backward pass has come so far.
"""

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from lockstep.schedules.instructions import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
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
    Partial,
    Receive,
    Schedule,
    Update,
    Value,
    Wait,
    WaitForBackward,
)
from lockstep.schedules.simulation import Delay, Simulation, Span, Thread, Todo, Until, Work

FORWARD, BACKWARD, UPDATE, ADD = "forward", "backward", "update", "add"  # what a rank does
EXCHANGE, BUBBLE = "exchange", "bubble"  # what it waits for: values of the exchange, or other ranks' passes


class Link(NamedTuple):
    """A device's connection to the others: seconds until a message is there, and bytes a second."""

    latency: float = 0.0
    bandwidth: float = math.inf


class StepCosts(Protocol):
    """What the instructions of a step cost, in seconds of a rank that has its hardware for itself."""

    def forward(self, rank: int, shard: int, stage: int) -> float:
        """A forward pass, with what it takes to get the samples."""

    def backward(self, rank: int, shard: int, stage: int) -> float:
        """A backward pass."""

    def add(self, rank: int, num_entries: int) -> float:
        """The sum of two vectors."""

    def update(self, rank: int, num_entries: int) -> float:
        """The update of so many parameters."""

    def num_bytes(self, value: Value) -> int:
        """The size of a value that is sent."""

    def link(self, rank: int, value: Value | None = None) -> Link:
        """How a rank reaches the others, with a value that it sends."""

    def hardware(self, rank: int) -> Hashable:
        """Ranks with the same share it, and slow each other down."""

    def slowdown(self, kind: str, num_active: int) -> float:
        """How many times as long work of a kind takes while so many ranks work on the same hardware."""


class Clocked(NamedTuple):
    """A step on the clock."""

    spans: list[Span]
    seconds: float

    def totals(self) -> dict[str, float]:
        """The time that a rank spends with each kind of thing, on average."""
        num_ranks = len({span.rank for span in self.spans}) or 1
        found: dict[str, float] = defaultdict(float)
        for span in self.spans:
            found[span.kind] += (span.end - span.start) / num_ranks
        return dict(found)


def run_on_clock(schedule: Schedule, costs: StepCosts) -> Clocked:
    """The step from its first instruction to its last, on all ranks."""
    return _Clock(schedule, costs).run()


class _Clock:
    """What each instruction means for the time."""

    def __init__(self, schedule: Schedule, costs: StepCosts) -> None:
        self._schedule, self._costs = schedule, costs
        self._simulation = Simulation(costs.slowdown)
        self._link_free: dict[int, float] = defaultdict(float)
        self._backward: dict[int, tuple[float, float]] = {}  # when the last one of a rank began, and its seconds
        self._receives = [_receives_of((*p.compute, *p.exchange, *p.update)) for p in schedule.programs]
        self._last_shards = [_last_shard(program.compute) for program in schedule.programs]

    def run(self) -> Clocked:
        threads, overlaps = list[Thread](), self._schedule.overlaps
        for rank, program in enumerate(self._schedule.programs):
            if overlaps:
                exchange = self._exchange(rank, program.exchange)
                threads.append(Thread(rank, exchange, ("exchange", rank), is_recorded=False))
            threads.append(Thread(rank, self._main(rank), self._costs.hardware(rank)))
        self._simulation.run(threads)
        spans = self._simulation.spans
        return Clocked(spans, max((span.end for span in spans), default=0.0))

    # --- threads ---

    def _main(self, rank: int) -> Todo:
        program = self._schedule.programs[rank]
        for instruction in program.compute:
            yield from self._execute(rank, instruction)
        if self._schedule.overlaps:
            yield Until(EXCHANGE, (("exchanged", rank),))
        else:
            yield from self._exchange(rank, program.exchange)
        yield Until(BUBBLE, ("gathered",))
        for instruction in program.update:
            yield from self._execute(rank, instruction)

    def _exchange(self, rank: int, instructions: tuple[Instruction, ...]) -> Todo:
        for instruction in instructions:
            yield from self._execute(rank, instruction, in_exchange=True)
        self._simulation.happens(("exchanged", rank), self._simulation.now)

    def _execute(self, rank: int, instruction: Instruction, in_exchange: bool = False) -> Todo:
        costs, group = self._costs, self._schedule.layer_group(rank)
        match instruction:
            case Forward(shard, stage) | Evaluate(shard, stage):
                yield from self._together(instruction, group, BUBBLE)
                yield Work(FORWARD, costs.forward(rank, shard, stage), shard, stage)
            case Backward(shard, stage, _):
                yield from self._together(instruction, group, BUBBLE)
                yield Work(BACKWARD, costs.backward(rank, shard, stage), shard, stage)
            case ForwardBackward(shards):
                yield from self._together(instruction, group, BUBBLE)
                for shard in shards:
                    yield Work(FORWARD, costs.forward(rank, shard, 0), shard, 0)
                for shard in shards:
                    seconds, is_last = costs.backward(rank, shard, 0), shard == self._last_shards[rank]
                    if is_last:
                        self._backward[rank] = self._simulation.now, seconds
                        self._simulation.happens(("last backward", rank), self._simulation.now)
                    yield Work(BACKWARD, seconds, shard, 0)
                    if is_last:
                        self._simulation.happens(("last backward is over", rank), self._simulation.now)
            case WaitForBackward(leaf):
                yield from self._bucket(rank, leaf)
            case Add(total, parts):
                kind = EXCHANGE if in_exchange else ADD
                yield Work(kind, costs.add(rank, len(total.entries)) * (len(parts) - 1))
            case Communicate(_, _, sends, _, _):
                for value, target in sends:
                    self._send(rank, target, value)
            case Wait(_, _, channel):
                kind = BUBBLE if channel in (ACTIVATIONS, ACTIVATION_GRADIENTS) else EXCHANGE
                receives = self._receives[rank][instruction]
                yield Until(kind, tuple((source, rank, value) for value, source in receives))
            case AllReduce(total, _):
                yield from self._collective(rank, instruction, costs.num_bytes(total))
            case GatherNorms():
                yield from self._collective(rank, instruction, 0)
            case AllGather():
                self._simulation.arrives("gathered", len(self._schedule.programs), costs.link(rank).latency)
            case Update(total):
                entries = sum(len(part.entries) for part in total)
                yield Work(UPDATE, costs.update(rank, entries))

    def _together(self, instruction: Instruction, ranks: range, kind: str) -> Todo:
        """What some ranks do together starts when the last of them is there."""
        if len(ranks) > 1:
            self._simulation.arrives(event := (ranks, instruction), len(ranks), 0.0)
            yield Until(kind, (event,))

    def _collective(self, rank: int, instruction: Instruction, num_bytes: int) -> Todo:
        """An all-reduce of all ranks by the framework: as a ring would take."""
        ranks, link = range(len(self._schedule.programs)), self._costs.link(rank)
        self._simulation.arrives(event := (ranks, type(instruction)), len(ranks), 0.0)
        yield Until(EXCHANGE, (event,))
        share = 2 * (len(ranks) - 1) / len(ranks)
        yield Delay(EXCHANGE, share * (num_bytes / link.bandwidth + len(ranks) * link.latency))

    def _bucket(self, rank: int, leaf: Partial) -> Todo:
        """A bucket is there before the backward pass is over, which fills the vector from the end."""
        entries = self._schedule.programs[rank].entries
        yield Until(BUBBLE, (("last backward", rank),))
        began, seconds = self._backward[rank]
        done = 1 - (leaf.entries.start - entries.start) / max(1, len(entries))
        if done == 1:
            yield Until(BUBBLE, (("last backward is over", rank),))
        else:
            yield Delay(BUBBLE, max(0.0, began + done * seconds - self._simulation.now))

    # --- values on their way ---

    def _send(self, rank: int, target: int, value: Value) -> None:
        link = self._costs.link(rank, value)
        leaves = max(self._simulation.now, self._link_free[rank]) + self._costs.num_bytes(value) / link.bandwidth
        self._link_free[rank] = leaves
        self._simulation.happens((rank, target, value), leaves + link.latency)


def _last_shard(instructions: tuple[Instruction, ...]) -> int:
    computed = [i.shards[-1] for i in instructions if isinstance(i, ForwardBackward) and i.shards]
    return computed[-1] if computed else -1


def _receives_of(instructions: tuple[Instruction, ...]) -> dict[Wait, tuple[Receive, ...]]:
    """What each wait of a rank is for."""
    return {Wait(i.number, i.round, i.channel): i.receives for i in instructions if isinstance(i, Communicate)}
