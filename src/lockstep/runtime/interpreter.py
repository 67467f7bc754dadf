"""Executes the instructions of one rank: the only place where gradients are added and values are sent.

Engines differ in who calls it: a thread for each rank, the main thread of a rank's process, or one thread for all ranks
(CUDA graph capture, `lockstep.allreduce`). Transports differ in how a value gets from rank to rank.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from lockstep.backends import Tensor, flat
from lockstep.core.errors import LockstepError, RankError
from lockstep.core.source_lines import user_source_line
from lockstep.core.tracing import WAIT, span, traced
from lockstep.replicas.replica import BatchSummary, Leaf, Replica, Shard
from lockstep.runtime.bucket_queue import BucketQueue
from lockstep.runtime.engine import Rank, RankResult, StepInput, weights_of
from lockstep.runtime.held_values import HeldValues
from lockstep.runtime.out_of_memory import OutOfMemoryCause, is_out_of_memory
from lockstep.runtime.transport import Cancelled, TransferGroup, Transport
from lockstep.runtime.workspace import Workspace
from lockstep.schedules.instructions import (
    Add,
    AllGather,
    AllReduce,
    Communicate,
    ForwardBackward,
    Instruction,
    Partial,
    RankProgram,
    Schedule,
    Update,
    Wait,
    WaitForBackward,
)
from lockstep.schedules.reduction_tree import Node, sum_with_brackets

StartExchange = Callable[["Interpreter"], Callable[[], Any]]  # starts `exchange` on another thread; waits for it
FusedAdd = Callable[[str, list[Tensor]], Tensor]  # the sum of x0, x1, ... in these brackets, in one kernel


class ComputeCapture(Protocol):
    """Replaces the first phase of a step."""

    fused_add: FusedAdd

    def compute(self, interpreter: "Interpreter", work: StepInput) -> bool:
        """Does it, up to `AllGather`; False if the interpreter has to."""


class Interpreter:
    """One rank's side of a schedule, which it runs step after step."""

    def __init__(
        self,
        rank: Rank,
        schedule: Schedule,
        transport: Transport,
        fused_add: FusedAdd | None = None,
        capture: ComputeCapture | None = None,
    ) -> None:
        self.rank, self._transport, self._capture = rank, transport, capture
        self._fused_add = capture.fused_add if capture else fused_add
        self._entries, self._overlaps = schedule.entries, schedule.overlaps
        self.program: RankProgram = schedule.programs[rank.number]
        self.workspace = Workspace(rank.backend, rank.device, self.program)
        computed = [i.shards for i in self.program.compute if isinstance(i, ForwardBackward)]
        self._last_shards = computed[-1] if computed else range(0)
        awaited = [i.leaf.entries for i in self.program.exchange if isinstance(i, WaitForBackward)]
        self._bucket_ranges = [self._in_vector(entries) for entries in awaited]
        self._buckets = BucketQueue(self._bucket_ranges)
        self.own_shards = range(computed[0].start, computed[-1].stop) if computed else range(0)
        self.held = HeldValues(rank.backend)
        self._num_done = 0  # instructions of the exchange that were done with the shards
        self._groups: dict[tuple[int, int], Communicate] = {}  # under way
        self.total: Tensor | None = None  # once the exchange is over

    def begin(self, work: StepInput, replica: Replica) -> None:
        """Makes ready for a step."""
        self._work, self._replica, self._began = work, replica, time.perf_counter()
        self.held, self.total, self._num_done = HeldValues(self.rank.backend), None, 0
        self._leaves: list[Leaf] = []
        self._buckets = BucketQueue(self._bucket_ranges)

    def run(self, work: StepInput, replica: Replica, start_exchange: StartExchange) -> list[RankResult]:
        """A whole step; the results of all ranks. An error names this rank and the phase it was in."""
        rank = self.rank
        try:
            with traced(rank.trace, lambda: rank.backend.synchronize(rank.device)):
                self.begin(work, replica)
                replica.begin_step(work.step)
                wait_for_exchange = start_exchange(self) if self._overlaps else None
                rank.position.phase = "forward and backward"
                with span(rank.position.phase):
                    is_captured = self._capture is not None and self._capture.compute(self, work)
                    for instruction in self.program.compute:
                        if not is_captured or isinstance(instruction, AllGather):
                            _HANDLERS[type(instruction)](self, instruction)
                rank.position.phase = "exchange"
                if wait_for_exchange is None:
                    self.exchange()
                else:
                    with span(WAIT):
                        wait_for_exchange()
                results = self.results()
                rank.position.phase = "update"
                with span(rank.position.phase):
                    for instruction in self.program.update:
                        _HANDLERS[type(instruction)](self, instruction)
                rank.backend.synchronize(rank.device)
                return results
        except BaseException as problem:
            self.cancel()
            if isinstance(problem, (LockstepError, Cancelled)) or not isinstance(problem, (Exception, SystemExit)):
                raise
            raise RankError(
                rank.number, rank.device, rank.position.phase, problem, user_source_line(problem)
            ) from problem

    def exchange(self) -> None:
        """The second phase of a step; on a thread of its own, where it overlaps with the first."""
        with span("exchange"):
            for instruction in self.program.exchange[self._num_done :]:
                _HANDLERS[type(instruction)](self, instruction)
            self.rank.backend.synchronize(self.rank.device)
            self.hold_total()

    def execute(self, instruction: Instruction) -> None:
        """One instruction, for callers that run all ranks on one thread."""
        _HANDLERS[type(instruction)](self, instruction)

    def add_own(self) -> None:
        """The additions that come before anything is communicated."""
        while self._num_done < len(self.program.exchange):
            instruction = self.program.exchange[self._num_done]
            if not isinstance(instruction, Add):
                return
            self._add(instruction)
            self._num_done += 1

    def all_held(self) -> tuple[list[Leaf], HeldValues, int]:
        """What its shards and additions left, and how many of these were done, for `hold_all`."""
        return self._leaves, self.held, self._num_done

    def hold_all(self, leaves: list[Leaf], held: HeldValues, num_done: int) -> None:
        """All of it was done by a replay: takes what was left."""
        self.held, self._leaves, self._num_done = held.copy(), leaves, num_done

    def cancel(self) -> None:
        """This rank has failed: wakes the threads of this process that wait for it."""
        self._buckets.cancel()
        self._transport.cancel()

    def results(self) -> list[RankResult]:
        """What the shards of all ranks leave besides gradients; waits for them."""
        return self._wait_for_results()

    def summary(self) -> BatchSummary:
        """What the update has to know about the whole batch."""
        ranks = self.results()
        return BatchSummary(
            shard_sizes=[len(shard) for shard in self._work.shards],
            buffers=[buffers for rank in ranks for buffers in rank.buffers],
            used=frozenset(number for rank in ranks for number in rank.used),
            weights=weights_of(ranks),
        )

    # --- one method for each instruction ---

    def _forward_backward(self, instruction: ForwardBackward) -> None:
        work, shards = self._work, []
        is_last = instruction.shards == self._last_shards
        for number in instruction.shards:
            samples = work.shards[number]
            with span("data"):
                X, y = work.batch.fetch(self.rank.number, samples.start, samples.stop)
            on_ready = self._buckets.on_ready if is_last and self._bucket_ranges else None
            shards.append(Shard(number, len(samples), X, y, on_ready))
        leaves = self._compute(shards)
        for number, leaf in zip(instruction.shards, leaves, strict=True):
            if not (is_last and number == instruction.shards[-1] and self._overlaps):  # the exchange has it already
                self.held.hold(Partial(Node(number, 1), self._entries), leaf.gradient)
            self._leaves.append(leaf._replace(gradient=None))
        if is_last:
            self.rank.backend.synchronize(self.rank.device)
            self._buckets.finish(flat(leaves[-1].gradient) if self._bucket_ranges else None)

    def _compute(self, shards: list[Shard]) -> list[Leaf]:
        try:
            return self._replica.forward_backward(shards, self._transport.all_gather_tensors)
        except BaseException as problem:
            if not is_out_of_memory(problem):
                raise
            cause = OutOfMemoryCause(problem)
        self.held.clear()
        raise cause.to_error(self.rank, self._replica, self._work, shards[0].num_samples, self._transport)

    def _all_gather(self, instruction: AllGather) -> None:
        leaves = self._leaves
        own = RankResult(
            losses=[leaf.loss for leaf in leaves],
            buffers=[leaf.buffers for leaf in leaves if leaf.buffers is not None],
            used=sorted(frozenset().union(*(leaf.used for leaf in leaves))),
            seconds=time.perf_counter() - self._began if leaves else 0.0,
            weights=[leaf.weight for leaf in leaves if leaf.weight is not None],
        )
        self._wait_for_results = self._transport.all_gather(own)

    def _wait_for_backward(self, instruction: WaitForBackward) -> None:
        with span(WAIT):
            gradient = self._buckets.wait()
        part = self._in_vector(instruction.leaf.entries)
        self.held.hold(instruction.leaf, self.rank.backend.chunk(gradient, part.start, part.stop))

    def _add(self, instruction: Add) -> None:
        brackets = sum_with_brackets([f"x{number}" for number in range(len(instruction.parts))], "({}+{})".format)
        pieces = [found for part in instruction.parts if (found := self.held.pieces(part)) is not None]
        if len(pieces) == len(instruction.parts) and pieces[0].can_add(len(pieces)):
            total = pieces[0].added(brackets, pieces[1:])
        elif len(instruction.parts) > 2:
            assert self._fused_add is not None, "only schedules for CUDA graphs have it"
            total = self._fused_add(brackets, [self.held.vector(part) for part in instruction.parts])
        else:
            left, right = (self.held.vector(part) for part in instruction.parts)
            out = self.workspace.memory(instruction.total)
            total = self.rank.backend.add(left, right, left if out is None and self.workspace.accumulates else out)
        if instruction.total.entries == self._entries:  # nobody else needs the parts: their memory is free
            for part in instruction.parts:
                self.held.drop(part.node)
        self.held.hold(instruction.total, total)

    def _communicate(self, instruction: Communicate) -> None:
        sends = [(send.to, self.held.vector(send.value)) for send in instruction.sends]
        receives: list[tuple[int, Tensor | None]] = []
        for value, source in instruction.receives:
            by_reference = self._transport.shares_memory_with(source) and not self.workspace.is_total(value)
            receives.append((source, None if by_reference else self.workspace.memory(value)))
        self._transport.start(TransferGroup(instruction.bucket, instruction.round, sends, receives))
        self._groups[instruction.bucket, instruction.round] = instruction

    def _wait(self, instruction: Wait) -> None:
        received = self._transport.finish(instruction.bucket, instruction.round)
        group = self._groups.pop((instruction.bucket, instruction.round))
        for receive, tensor in zip(group.receives, received, strict=True):
            self.held.hold(receive.value, tensor)

    def _all_reduce(self, instruction: AllReduce) -> None:
        own = self.workspace.zeros(len(instruction.total.entries))
        for part in instruction.parts:
            own = self.rank.backend.add(own, self.held.vector(part), own)
        self.held.hold(instruction.total, self._transport.all_reduce(own))

    def _update(self, instruction: Update) -> None:
        self._replica.update(self._work.step, self.total, self.summary())

    # --- values ---

    def _in_vector(self, entries: range) -> range:
        """Entries of the whole model as entries of this rank's vector."""
        return range(entries.start - self._entries.start, entries.stop - self._entries.start)

    def release_total(self) -> Tensor:
        """The total, once the exchange is over. Nothing of it is kept here."""
        self.hold_total()
        total, self.total = self.total, None
        self.workspace.use_as_total(None)
        return total

    def hold_total(self) -> None:
        """The exchange is over: all values but the total are dropped. What was received by reference has been read."""
        (update,) = self.program.update
        assert isinstance(update, Update), "it is the whole phase"
        self.total = self.workspace.joined(update.total, [self.held.vector(part) for part in update.total])
        self.held.clear()


_HANDLERS: dict[type, Callable[[Any, Any], None]] = {
    ForwardBackward: Interpreter._forward_backward,
    AllGather: Interpreter._all_gather,
    WaitForBackward: Interpreter._wait_for_backward,
    Add: Interpreter._add,
    Communicate: Interpreter._communicate,
    Wait: Interpreter._wait,
    AllReduce: Interpreter._all_reduce,
    Update: Interpreter._update,
}
