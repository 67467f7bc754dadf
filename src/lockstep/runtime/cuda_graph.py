"""The step on one GPU, captured once as a CUDA graph for each size of batch and replayed from then on.

A step of a small model is hundreds of kernels, and launching them takes longer than running them. The same interpreter
runs the same kind of schedule while the GPU captures it: the gathering of samples, every shard's forward and backward
on a stream of its own, the additions, the exchange. The update is captured too, if it is the same in every step from
then on; else it runs eagerly, as its learning rate is a number of the host. Nobody waits for the GPU within an epoch;
the host is a few steps ahead of it.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

from lockstep.backends import GraphCapture, LossFuture, Tensor
from lockstep.core.errors import CaptureError, RunError
from lockstep.core.tracing import SpanName, Trace, span, traced
from lockstep.data.batch import Batch
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.balance import Balance
from lockstep.partition.batch import split_into_shards
from lockstep.partition.ranks import split_over_ranks
from lockstep.replicas.replica import CapturableReplica, Replica
from lockstep.runtime.engine import Engine, Position, Rank, StepInput, has_all_ranks
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.out_of_memory import is_out_of_memory
from lockstep.runtime.rank_capture import RankCapturedSteps
from lockstep.runtime.rank_errors import errors_named
from lockstep.runtime.shard_groups import shard_groups
from lockstep.runtime.step import EagerSteps, StepOptions, Steps
from lockstep.runtime.thread_transport import ThreadGroup
from lockstep.schedules.exchanges import NATIVE
from lockstep.schedules.instructions import ForwardBackward, Instruction, Update
from lockstep.schedules.proof import one_thread_order

NUM_TIMED = 15  # replays that a time is the median of


def captured_or_eager_steps(
    engine: Engine, replicas: Sequence[Replica], options: StepOptions, balance: Balance
) -> Steps:
    """Captured steps where the devices and the replicas allow it; else `why_eager` says why not."""
    eager, backend = EagerSteps(engine, replicas, options, balance), engine.backend
    own = [backend.graph_capture([engine.devices[rank]], rank) for rank in engine.local_ranks]
    captures = [capture for capture in own if capture is not None]
    if len(captures) < len(own):
        return eager
    capturable = cast(Sequence[CapturableReplica], replicas)
    eager.why_eager = next(filter(None, (replica.why_not_capturable() for replica in capturable)), "")
    if eager.why_eager:
        return eager
    is_one_graph = has_all_ranks(engine) and options.exchange != NATIVE  # that is a call between processes
    whole = backend.graph_capture(engine.devices) if is_one_graph else None
    if whole is not None:
        return CapturedSteps(eager, engine, capturable, options, whole)
    return RankCapturedSteps(engine, capturable, options, balance, captures)


@dataclass
class CapturedStep:
    """The step of one size of batch, or what comes before its update."""

    replay: Callable[[], None]
    losses: Tensor  # of all shards; filled by each replay
    interpreters: list[Interpreter]  # what they hold is filled by each replay, too
    update: Callable[[], None] | None = None  # replays the update, where it was captured by itself
    update_settings: Any = None  # that are built into it


class CapturedSteps:
    """Steps that are captured and replayed; run by `eager` from the moment on when that proves impossible."""

    max_in_flight = 8

    def __init__(
        self,
        eager: EagerSteps,
        engine: Engine,
        replicas: Sequence[CapturableReplica],
        options: StepOptions,
        capture: GraphCapture,
    ) -> None:
        self._eager, self._engine, self._replicas = eager, engine, replicas
        self._options, self._capture = options, capture
        self.why_eager, self.capture_seconds = "", 0.0
        self._captured: dict[tuple[int, bool], CapturedStep] = {}  # samples of a batch, with the update? ->
        self._last_settings: Any = None  # of the last update of these replicas

    def run(self, step: int, batch: Batch) -> LossFuture:
        """Starts step number `step`; its losses come later."""
        if not self.why_eager:
            try:
                return self._replay(step, batch)
            except CaptureError as problem:
                self.why_eager = str(problem)
            self._discard()
        return self._eager.run(step, batch)

    def _replay(self, step: int, batch: Batch) -> LossFuture:
        if batch.static is None:
            raise CaptureError("a batch holds more than tensors")
        with self._capture.stream():
            batch.static(0).fill()
            with_update = all(replica.update_is_static(step) for replica in self._replicas)
            key = batch.num_samples, with_update
            if with_update:  # from now on: the other one is of no more use
                self._captured.pop((batch.num_samples, False), None)
            if key not in self._captured:
                began = time.perf_counter()
                self._captured[key] = self._capture_within_memory(step, batch, with_update)
                self.capture_seconds += time.perf_counter() - began
            captured = self._captured[key]
            for replica in self._replicas:
                replica.begin_replay(step)
            with traced(self._trace(step)):
                with span(SpanName.COMPUTE):  # with the exchange, and an update that is the same in every step
                    captured.replay()
                if not with_update:
                    with span(SpanName.UPDATE):
                        self._update_after(captured, step)
            return self._capture.copy_to_host(captured.losses)

    def _trace(self, step: int) -> Trace | None:
        """All ranks are one graph: what it does is shown as the work of the first."""
        if not self._engine.traces:
            return None
        self._engine.traces[0].start_step(step)
        return self._engine.traces[0]

    def seconds_without_update(self, step: int, batch: Batch, num_shards: int) -> float:
        """Captures a step in so many shards, without an update, and replays it: how long the GPU takes for it."""
        before, self._options = self._options, self._options._replace(num_shards=num_shards)
        try:
            assert batch.static is not None, "steps were captured"
            with self._capture.stream():
                batch.static(0).fill()
                captured = self._capture_within_memory(step, batch, with_update=False)
                times = [self._seconds_of(captured, step) for _ in range(NUM_TIMED)]
        finally:
            self._options = before
        return median(times)

    def _seconds_of(self, captured: CapturedStep, step: int) -> float:
        self._engine.backend.synchronize(self._engine.devices[0])
        for replica in self._replicas:
            replica.begin_replay(step)
        began = time.perf_counter()
        captured.replay()
        self._engine.backend.synchronize(self._engine.devices[0])
        return time.perf_counter() - began

    def _capture_within_memory(self, step: int, batch: Batch, with_update: bool) -> CapturedStep:
        """The captured step. Where shards side by side take too much memory, they are captured one after the other."""
        while True:
            try:
                return self._capture_step(step, batch, with_update)
            except RunError as problem:
                if not is_out_of_memory(problem):
                    raise
                if not self._capture.serialize_streams():
                    raise CaptureError("it takes more memory than there is") from problem
                self._discard()

    def _capture_step(self, step: int, batch: Batch, with_update: bool) -> CapturedStep:
        assert batch.static is not None, "samples in memory have it"
        shards = split_into_shards(batch.num_samples, self._options.num_shards)
        found = batch.static(0)  # all ranks are on one GPU
        static = Batch(batch.num_samples, found.fetch)
        order, interpreters = self._programs(len(shards))
        work, gather, is_warm = StepInput(step, static, shards), found.gather, False
        for replica in self._replicas:
            replica.begin_capture(step)
        gather()
        groups = []
        for rank, own in enumerate(split_over_ranks(len(shards), self._engine.num_ranks)):
            with self._errors_of(rank, "forward and backward"):
                groups += [(rank, group) for group in shard_groups(work, self._replicas[rank], rank, own)]

        def run() -> Tensor:
            nonlocal is_warm
            for replica, interpreter in zip(self._replicas, interpreters, strict=True):
                replica.begin_capture(step)
                interpreter.begin(work, replica)
            gather()
            self._compute_and_exchange(groups, order, interpreters)
            if with_update and is_warm:
                self._update(interpreters, step)
            elif with_update:
                for replica, interpreter in zip(self._replicas, interpreters, strict=True):
                    replica.warm_up_update(step, interpreter.state.total, interpreter.summary())
            is_warm = True
            return self._capture.stack([loss for rank in interpreters[0].results() for loss in rank.losses])

        def generators() -> list[object]:
            return [generator for replica in self._replicas for generator in replica.capture_generators()]

        return CapturedStep(*self._capture.capture(run, generators), interpreters)

    def _programs(self, num_shards: int) -> tuple[list[tuple[int, Instruction]], list[Interpreter]]:
        """What one thread does for all ranks before the update, and the interpreters to do it with."""
        engine, entries = self._engine, self._replicas[0].entries
        ranges = tuple(split_over_ranks(num_shards, engine.num_ranks))
        max_addends = self._capture.max_addends
        split = DataParallel(ranges, entries, (entries,), self._options.exchange, max_addends=max_addends)
        schedule = data_parallel(split)
        group = ThreadGroup(engine.backend, engine.devices, engine.devices)  # all are one GPU
        interpreters = [
            Interpreter(
                Rank(rank, device, engine.backend, Position()),
                schedule,
                group.transport(rank),
                self._capture.fused_add,
            )
            for rank, device in enumerate(engine.devices)
        ]
        return [entry for entry in one_thread_order(schedule) if not isinstance(entry[1], Update)], interpreters

    def _compute_and_exchange(
        self, groups: list[tuple[int, range]], order: list[tuple[int, Instruction]], interpreters: list[Interpreter]
    ) -> None:
        """All groups of shards side by side, each on a stream of its own; then what depends on them."""
        with self._capture.fork():
            for number, (rank, group) in enumerate(groups):
                stream = self._capture.side_stream(number, len(group))
                with stream, self._errors_of(rank, "forward and backward"):
                    interpreters[rank].execute(ForwardBackward(group))
        for rank, instruction in order:
            if not isinstance(instruction, ForwardBackward):
                interpreters[rank].execute(instruction)
        for interpreter in interpreters:
            interpreter.results()  # here, so that copies of others' buffers are captured too
            interpreter.hold_total()

    def _update(self, interpreters: list[Interpreter], step: int) -> None:
        for rank, (replica, interpreter) in enumerate(zip(self._replicas, interpreters, strict=True)):
            with self._errors_of(rank, "update"):
                replica.update(step, interpreter.state.total, interpreter.summary())

    def _update_after(self, captured: CapturedStep, step: int) -> None:
        """The update after a replay: the run's first is eager and makes the optimizer's state; others are captured."""
        settings = [replica.update_settings() for replica in self._replicas]
        if None in settings:
            self._update(captured.interpreters, step)
            return
        for replica in self._replicas:
            replica.begin_update(step)
        if captured.update is None and settings == self._last_settings:
            captured.update, _ = self._capture.capture(lambda: self._apply(captured), list, warms_up=False)
            captured.update_settings = settings
        if captured.update is None or settings != captured.update_settings:  # a scheduler changes more than the rate
            self._apply(captured)
        else:
            captured.update()
        self._last_settings = settings
        for replica in self._replicas:
            replica.end_update()

    def _apply(self, captured: CapturedStep) -> None:
        for rank, (replica, interpreter) in enumerate(zip(self._replicas, captured.interpreters, strict=True)):
            with self._errors_of(rank, "update"):
                replica.apply_update(interpreter.state.total, interpreter.summary())

    def _discard(self) -> None:
        self._captured.clear()
        for replica in self._replicas:
            replica.discard_capture()

    def _errors_of(self, rank: int, phase: str) -> AbstractContextManager[None]:
        return errors_named(rank, self._engine.devices[rank], Position(phase))
