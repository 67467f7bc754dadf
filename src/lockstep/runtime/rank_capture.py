"""The forward and backward passes of one rank, captured as a CUDA graph for each size of batch and replayed.

The rank has a GPU, and perhaps a process, of its own. What comes after its shards, the exchange and the update, goes
on as it does without capture. (Where all ranks share one GPU, `cuda_graph.py` captures the whole step at once.)
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.backends import GraphCapture, LossFuture
from lockstep.core.errors import CaptureError, RunError
from lockstep.core.tracing import traced
from lockstep.data.batch import Batch
from lockstep.partition.balance import Balance
from lockstep.replicas.replica import CapturableReplica
from lockstep.runtime.engine import Engine, StepInput
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.out_of_memory import is_out_of_memory
from lockstep.runtime.shard_groups import shard_groups
from lockstep.runtime.step import EagerSteps, StepOptions
from lockstep.runtime.step_state import Computed
from lockstep.schedules.instructions import ForwardBackward

CAPTURING = threading.Lock()  # one rank of a process at a time


class CapturedShards(NamedTuple):
    """A replay, and the values that it fills."""

    replay: Callable[[], None]
    filled: Computed


class RankCapturedSteps:
    """Steps in which each rank of this process captures its shards."""

    max_in_flight = 0

    def __init__(
        self,
        engine: Engine,
        replicas: Sequence[CapturableReplica],
        options: StepOptions,
        balance: Balance,
        captures: list[GraphCapture],
    ) -> None:
        self._ranks = [RankCapture(capture, replica) for capture, replica in zip(captures, replicas, strict=True)]
        engine.use_captures(self._ranks)
        # the exchange begins after the last shard: nothing can be seen of a graph that is under way
        options = options._replace(bucket_mb=0.0, max_addends=captures[0].max_addends)
        self._eager, self.why_eager, self.capture_seconds = EagerSteps(engine, replicas, options, balance), "", 0.0

    def run(self, step: int, batch: Batch) -> LossFuture:
        """Does step number `step`."""
        before = sum(rank.seconds for rank in self._ranks)
        losses = self._eager.run(step, batch)
        self.capture_seconds += sum(rank.seconds for rank in self._ranks) - before
        self.why_eager = next(filter(None, (rank.why_eager for rank in self._ranks)), "")
        return losses


class RankCapture:
    """Captures for one rank; computes eagerly from the moment on when that proves impossible."""

    def __init__(self, capture: GraphCapture, replica: CapturableReplica) -> None:
        self._graph, self._replica, self.fused_add = capture, replica, capture.fused_add
        self.why_eager, self.seconds = "", 0.0
        self._captured: dict[tuple[int, range], CapturedShards] = {}  # samples of a batch, the rank's shards ->

    def compute(self, interpreter: Interpreter, work: StepInput) -> bool:
        """Does what comes before the exchange; False if it has to be done eagerly."""
        if self.why_eager or work.batch.static is None:
            return False
        static = work.batch.static(interpreter.rank.number)
        key = work.batch.num_samples, interpreter.own_shards
        with self._graph.stream():
            try:
                static.fill()
                if key not in self._captured:
                    began = time.perf_counter()
                    self._captured[key] = self._capture(interpreter, work)
                    self.seconds += time.perf_counter() - began
            except CaptureError as problem:
                self.why_eager = str(problem)
                self._captured.clear()
                self._replica.discard_capture()
                interpreter.begin(work, self._replica)
                self._replica.begin_step(work.step)
                return False
            self._replica.begin_replay(work.step)
            captured = self._captured[key]
            captured.replay()
            interpreter.state.continue_from(captured.filled)
        return True

    def _capture(self, interpreter: Interpreter, work: StepInput) -> CapturedShards:
        while True:
            try:
                with CAPTURING, traced(None):  # its spans are not those of the step
                    return self._captured_shards(interpreter, work)
            except RunError as problem:
                if not is_out_of_memory(problem):
                    raise
                if not self._graph.serialize_streams():
                    raise CaptureError("it takes more memory than there is") from problem
                self._captured.clear()  # of other sizes of batch: they use what is discarded
                self._replica.discard_capture()

    def _captured_shards(self, interpreter: Interpreter, work: StepInput) -> CapturedShards:
        assert work.batch.static is not None, "checked before"
        static = work.batch.static(interpreter.rank.number)
        work = work._replace(batch=Batch(work.batch.num_samples, static.fetch))

        self._replica.begin_capture(work.step)
        static.gather()
        groups = shard_groups(work, self._replica, interpreter.rank.number, interpreter.own_shards)

        def run() -> Computed:
            self._replica.begin_capture(work.step)
            interpreter.begin(work, self._replica)
            static.gather()
            with self._graph.fork():
                for number, group in enumerate(groups):
                    with self._graph.side_stream(number, len(group)):
                        interpreter.execute(ForwardBackward(group))
            interpreter.add_own()
            return interpreter.state.computed()

        return CapturedShards(*self._graph.capture(run, self._replica.capture_generators))
