"""Executes the instructions of one rank: the only place where gradients of shards are added and values are sent.

Engines differ in who calls it: a thread for each rank, the main thread of a rank's process, or one thread for all ranks
(CUDA graph capture, `lockstep.allreduce`). Transports differ in how a value gets from rank to rank.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, cast

from lockstep.backends import Tensor, flat
from lockstep.core.tracing import WAIT, SpanName, span, traced
from lockstep.replicas.replica import BatchSummary, Evaluated, PartReplica, Replica, Shard
from lockstep.runtime.engine import Rank, RankResult, StepInput, ranks_together, summary_of
from lockstep.runtime.out_of_memory import OutOfMemoryCause
from lockstep.runtime.part_passes import PartPasses
from lockstep.runtime.rank_errors import errors_named, out_of_memory_explained
from lockstep.runtime.step_state import StepState
from lockstep.runtime.transfers import Transfers
from lockstep.runtime.transport import Transport
from lockstep.runtime.workspace import Workspace
from lockstep.schedules.instructions import (
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
    RankProgram,
    Schedule,
    Update,
    Wait,
    WaitForBackward,
)
from lockstep.schedules.reduction_tree import Node, brackets_of

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
        self._schedule, self._overlaps = schedule, schedule.overlaps
        self.program: RankProgram = schedule.programs[rank.number]
        self._entries = self.program.entries
        self._whole = {self._entries, *(i.entries for i in self.program.compute if isinstance(i, Backward))}
        self._all_gather_tensors = partial(transport.all_gather_tensors, ranks_together(schedule, rank.number))
        self.workspace = Workspace(rank.backend, rank.device, self.program)
        computed = [i.shards for i in self.program.compute if isinstance(i, ForwardBackward)]
        self._last_shards = computed[-1] if computed else range(0)
        awaited = [i.leaf.entries for i in self.program.exchange if isinstance(i, WaitForBackward)]
        self._bucket_ranges = [self._in_vector(entries) for entries in awaited]
        self.own_shards = range(computed[0].start, computed[-1].stop) if computed else range(0)
        self._transfers = Transfers(transport, self.workspace)
        self.state = self._new_state()
        self.results: Callable[[], list[RankResult]] = list  # what shards of all ranks leave besides gradients; waits

    def begin(self, work: StepInput, replica: Replica) -> None:
        """Makes ready for a step."""
        self.state = self._new_state()
        self.state.work, self.state.replica = work, replica

    def _new_state(self) -> StepState:
        passes = PartPasses(self._schedule, self._all_gather_tensors)
        return StepState(self.rank.backend, passes, self._bucket_ranges)

    @property
    def _work(self) -> StepInput:
        assert self.state.work is not None, "no step has begun"
        return self.state.work

    @property
    def _replica(self) -> Replica:
        assert self.state.replica is not None, "no step has begun"
        return self.state.replica

    def run(self, work: StepInput, replica: Replica, start_exchange: StartExchange) -> list[RankResult]:
        """A whole step; the results of all ranks. An error names this rank and the phase it was in."""
        rank = self.rank
        with self._errors_named(), traced(rank.trace, lambda: rank.backend.synchronize(rank.device)):
            self.begin(work, replica)
            replica.begin_step(work.step)
            wait_for_exchange = start_exchange(self) if self._overlaps else None
            rank.position.phase = "forward and backward"
            with span(SpanName.COMPUTE, synchronizes=True):
                is_captured = self._capture is not None and self._capture.compute(self, work)
                for instruction in self.program.compute:
                    if not is_captured or isinstance(instruction, AllGather):
                        self.execute(instruction)
            rank.position.phase = "exchange"
            if wait_for_exchange is None:
                self.exchange()
            else:
                with span(WAIT):
                    wait_for_exchange()
            results = self.results()
            rank.position.phase = "update"
            with span(SpanName.UPDATE, synchronizes=True):
                for instruction in self.program.update:
                    self.execute(instruction)
                replica.finish_update()
            rank.backend.synchronize(rank.device)
            rank.position.is_mid_update = False
            return results

    def evaluate(self, work: StepInput, replica: Replica) -> list[Evaluated]:
        """Evaluates samples that go through parts of the model; what this rank has found."""
        with self._errors_named():
            self.begin(work, replica)
            self.rank.position.phase = "evaluation"
            for instruction in self.program.compute:
                self.execute(instruction)
            self.rank.backend.synchronize(self.rank.device)
            return self.state.passes.evaluated

    def _errors_named(self) -> AbstractContextManager[None]:
        return errors_named(self.rank.number, self.rank.device, self.rank.position, self.cancel)

    def exchange(self) -> None:
        """The second phase of a step; on a thread of its own, where it overlaps with the first."""
        with span(SpanName.EXCHANGE, synchronizes=True):
            for instruction in self.program.exchange[self.state.num_done :]:
                self.execute(instruction)
            self.rank.backend.synchronize(self.rank.device)
            self.hold_total()

    def execute(self, instruction: Instruction) -> None:
        """One instruction, also for callers that run all ranks on one thread."""
        _HANDLERS[type(instruction)](self, instruction)

    def add_own(self) -> None:
        """The additions that come before anything is communicated."""
        for instruction in takewhile(lambda i: isinstance(i, Add), self.program.exchange[self.state.num_done :]):
            self.execute(instruction)
            self.state.num_done += 1

    def cancel(self) -> None:
        """This rank has failed: wakes the threads of this process that wait for it."""
        self.state.buckets.cancel()
        self._transport.cancel()

    def summary(self) -> BatchSummary:
        """What the update has to know about the whole batch."""
        return summary_of(self.results(), self._schedule, self.rank.number, self._work)._replace(norms=self.state.norms)

    # --- one method for each instruction ---

    def _fetch(self, number: int) -> Shard:
        samples = self._work.shards[number]
        with span(SpanName.DATA, number):
            X, y = self._work.batch.fetch(self.rank.number, samples.start, samples.stop)
        return Shard(number, len(samples), X, y)

    def _forward_backward(self, instruction: ForwardBackward) -> None:
        is_last = instruction.shards == self._last_shards
        on_ready = self.state.buckets.on_ready if is_last and self._bucket_ranges else None
        shards = [self._fetch(number)._replace(on_ready=on_ready) for number in instruction.shards]
        with self._memory_for(shards[0].num_samples), span(SpanName.COMPUTE, instruction.shards.start):
            leaves = self._replica.forward_backward(shards, self._all_gather_tensors)
        for number, leaf in zip(instruction.shards, leaves, strict=True):
            if not (is_last and number == instruction.shards[-1] and self._overlaps):  # the exchange has it already
                self.state.sums.put(Partial(Node(number, 1), self._entries), leaf.gradient)
            self.state.leaves.append(leaf._replace(gradient=None))
        if is_last:
            self.rank.backend.synchronize(self.rank.device)
            self.state.buckets.finish(flat(leaves[-1].gradient) if self._bucket_ranges else None)

    def _forward(self, instruction: Forward) -> None:
        with self._memory_for(len(self._work.shards[instruction.shard])), span(SpanName.FORWARD, *instruction):
            self.state.passes.forward(instruction, cast(PartReplica, self._replica), self._fetch)

    def _backward(self, instruction: Backward) -> None:
        with self._memory_for(len(self._work.shards[instruction.shard])), span(SpanName.BACKWARD, *instruction[:2]):
            leaf = self.state.passes.backward(instruction, cast(PartReplica, self._replica))
        self.state.sums.put(Partial(Node(instruction.shard, 1), instruction.entries), leaf.gradient)
        leaf, later = leaf._replace(gradient=None), self.state.stage_leaves.get(instruction.shard)  # of two stages
        self.state.stage_leaves[instruction.shard] = leaf if later is None else later.joined(leaf)

    def _evaluate(self, instruction: Evaluate) -> None:
        self.state.passes.evaluate(instruction, cast(PartReplica, self._replica), self._fetch)

    def _memory_for(self, num_samples: int) -> AbstractContextManager[None]:
        """A full memory is explained by a shard of so many samples."""

        def to_error(cause: OutOfMemoryCause) -> Exception:
            self.state.sums.clear()
            self._transport.cancel()
            whole = self._replica if self._schedule.num_parts == 1 else None  # others cannot be tried by one rank
            return cause.to_error(self.rank, whole, self._work, num_samples, self._all_gather_tensors)

        return out_of_memory_explained(to_error)

    def _all_gather(self, instruction: AllGather) -> None:
        leaves = self.state.leaves or [leaf for _, leaf in sorted(self.state.stage_leaves.items())]
        own = RankResult.of_leaves(leaves, time.perf_counter() - self.state.began)
        self.results = self._transport.all_gather(own)

    def _wait_for_backward(self, instruction: WaitForBackward) -> None:
        with span(WAIT):
            gradient = self.state.buckets.wait()
        part = self._in_vector(instruction.leaf.entries)
        self.state.sums.put(instruction.leaf, self.rank.backend.chunk(gradient, part.start, part.stop))

    def _add(self, instruction: Add) -> None:
        brackets = brackets_of(len(instruction.parts))
        pieces = [found for part in instruction.parts if (found := self.state.sums.pieces(part)) is not None]
        if len(pieces) == len(instruction.parts) and pieces[0].can_add(len(pieces)):
            total = pieces[0].added(brackets, pieces[1:])
        elif len(instruction.parts) > 2:
            assert self._fused_add is not None, "only schedules for CUDA graphs have it"
            total = self._fused_add(brackets, [self.state.sums.vector(part) for part in instruction.parts])
        else:
            left, right = (self.state.sums.vector(part) for part in instruction.parts)
            out = self.workspace.memory(instruction.total)
            total = self.rank.backend.add(left, right, left if out is None and self.workspace.accumulates else out)
        if instruction.total.entries in self._whole:  # nobody else needs the parts: their memory is free
            for part in instruction.parts:
                self.state.sums.drop(part)
        self.state.sums.put(instruction.total, total)

    def _gather_norms(self, instruction: GatherNorms) -> None:
        norms = self._replica.gradient_norms(self.state.total, self.summary())
        found = self._transport.all_gather(RankResult([], [], [], 0.0, [], norms))()
        self.state.norms = {name: norm for rank in found for name, norm in (rank.norms or {}).items()}

    def _all_reduce(self, instruction: AllReduce) -> None:
        own = self.workspace.zeros(len(instruction.total.entries))
        for part in instruction.parts:
            own = self.rank.backend.add(own, self.state.sums.vector(part), own)
        self.state.sums.put(instruction.total, self._transport.all_reduce(own))

    def _update(self, instruction: Update) -> None:
        self.rank.position.is_mid_update = True
        self._replica.update(self._work.step, self.state.total, self.summary())

    def _in_vector(self, entries: range) -> range:
        """Entries of the whole model as entries of this rank's vector."""
        return range(entries.start - self._entries.start, entries.stop - self._entries.start)

    def release_total(self) -> Tensor:
        """The total, once the exchange is over. Nothing of it is kept here."""
        self.hold_total()
        total, self.state.total = self.state.total, None
        self.workspace.use_as_total(None)
        return total

    def hold_total(self) -> None:
        """The exchange is over: all values but the total are dropped. What was received by reference has been read."""
        (parts,) = [instruction.total for instruction in self.program.update if isinstance(instruction, Update)]
        self.state.total = (
            self.workspace.joined(parts, [self.state.sums.vector(part) for part in parts]) if parts else None
        )
        self.state.sums.clear()


_HANDLERS: dict[type, Callable[[Any, Any], None]] = {
    ForwardBackward: Interpreter._forward_backward,
    Forward: Interpreter._forward,
    Backward: Interpreter._backward,
    Evaluate: Interpreter._evaluate,
    AllGather: Interpreter._all_gather,
    WaitForBackward: Interpreter._wait_for_backward,
    Add: Interpreter._add,
    Communicate: lambda self, instruction: self._transfers.start(instruction, self.state),
    Wait: lambda self, instruction: self._transfers.finish(instruction, self.state),
    AllReduce: Interpreter._all_reduce,
    GatherNorms: Interpreter._gather_norms,
    Update: Interpreter._update,
}
