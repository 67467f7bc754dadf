"""`processes`: one process a device. This process owns one rank, and works for it on its main thread.

The schedule and the interpreter are those of the other engine; here a value goes over Gloo or NCCL.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.core.errors import BackendError
from lockstep.core.layout import Array
from lockstep.core.serialization import pack
from lockstep.core.tracing import Trace, traced
from lockstep.replicas.replica import Evaluated, Replica
from lockstep.runtime.engine import Position, Rank, StepInput, StepResult
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.process_transport import ProcessTransport, check_same_call
from lockstep.runtime.rank_errors import errors_named
from lockstep.runtime.rank_thread import RankThread
from lockstep.runtime.stage_messages import unpacked_messages
from lockstep.schedules.instructions import Schedule


def check_can_fork(backend: Backend, devices: Sequence[Device]) -> None:
    """Refuses to start workers for GPUs from a process that has used one already: CUDA does not survive a fork."""
    if devices[0].kind == "cuda" and (reason := backend.why_not_fork()):
        raise BackendError(reason)


class Processes:
    """One of the ranks is in this process; `group` leads to the others, which may be told its `position`."""

    def __init__(
        self,
        backend: Backend,
        devices: list[Device],
        group: ProcessGroup,
        position: Position | None = None,
        *,
        has_session: bool = True,  # from its start to its end, or the caller has one whenever it calls
    ) -> None:
        self._has_session = has_session
        self.backend, self.devices, self.position = backend, devices, position or Position()
        self.num_ranks, self.rank = len(devices), group.rank
        self.local_ranks = range(self.rank, self.rank + 1)
        self.device = devices[self.rank]
        self.traces: list[Trace] = []  # that of this rank, while a run is traced
        self._captures: list[Any] = []  # that of this rank, where its shards are captured
        self._group = group
        self._schedule: Schedule | None = None
        self._interpreter: Interpreter | None = None
        self._comm_thread: RankThread | None = None  # for exchanges that overlap with the backward pass
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._undo.callback(self._end_comm_thread)  # after the connections, for one of which it may wait
        self._undo.callback(self._group.close)
        try:
            if self._has_session:
                self._undo.enter_context(self.backend.session([self.device]))
            self.each("start", lambda rank, device: self.backend.start_worker(device))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and puts the framework's settings back. Twice does no harm."""
        if self._interpreter is not None:
            self._interpreter.cancel()
        self._schedule, self._interpreter, self._captures = None, None, []
        self._undo.close()

    def _end_comm_thread(self) -> None:
        if self._comm_thread is not None:
            self._comm_thread.end()
            self._comm_thread = None

    def run(self, schedule: Schedule, replicas: Sequence[Replica], work: StepInput) -> StepResult:
        if self._interpreter is None or schedule is not self._schedule:
            self._schedule, self._interpreter = schedule, self.interpreter(schedule)
        self.position.step = work.step
        for trace in self.traces:
            trace.start_step(work.step)
        results = self._interpreter.run(work, replicas[0], self._start_exchange)
        self.set_phase("loading of samples")
        return StepResult.of_ranks(schedule, results)

    def evaluate(self, schedule: Schedule, replicas: Sequence[Replica], work: StepInput) -> list[list[Evaluated]]:
        return [self.interpreter(schedule).evaluate(work, replicas[0])]

    def use_captures(self, captures: list[Any]) -> None:
        self._captures, self._schedule = captures, None

    def interpreter(self, schedule: Schedule) -> Interpreter:
        """This rank's side of a schedule."""
        self._group.connect(schedule)
        transport = ProcessTransport(self._group, self.position, schedule.replicas_of(self.rank))
        trace = self.traces[0] if self.traces else None
        capture = self._captures[0] if self._captures else None
        rank = Rank(self.rank, self.device, self.backend, self.position, trace)
        return Interpreter(rank, schedule, transport, capture=capture)

    def _start_exchange(self, interpreter: Interpreter) -> Callable[[], Any]:
        """Runs the exchange on the comm thread; the function waits for it."""
        if self._comm_thread is None:
            self._comm_thread = RankThread(f"lockstep-exchange-{self.rank}")
            self._comm_thread.submit(self.backend.start_worker, self.device).result()

        def work() -> None:
            with traced(interpreter.rank.trace and interpreter.rank.trace.exchange):
                interpreter.exchange()

        return self._comm_thread.submit(work).result

    def each(self, phase: str, work: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """`work(rank, device, ...)` for this process's rank."""
        self.position.phase, trace = phase, self.traces[0] if self.traces else None
        with (
            errors_named(self.rank, self.device, self.position),
            traced(trace, lambda: self.backend.synchronize(self.device)),
        ):
            result = work(self.rank, self.device, *(entries[0] for entries in lists))
            self.backend.synchronize(self.device)
        self.position.phase = f"between phases, after {phase}"  # not on an error: others look for who did not arrive
        return [result]

    def set_call(self, call: str) -> None:
        self.position.call = call

    def set_phase(self, phase: str) -> None:
        self.position.phase = phase

    def copy_to_devices(self, array: Array) -> list[Tensor]:
        return self.each("copying data to the device", lambda rank, device: self.backend.from_numpy(array, device))

    def all_gather(self, values: list[Any]) -> list[Any]:
        own = pack({"call": self.position.call, "value": values[0]})
        (found,) = self.each(
            "exchange",
            lambda rank, device: unpacked_messages(self._group.all_gather(own)),
        )
        check_same_call(self.position.call, found)
        return [other["value"] for other in found]

    def broadcast(self, source: int, make: Callable[[], bytes]) -> bytes:
        own = make() if self.rank == source else b""
        (found,) = self.each("exchange", lambda rank, device: self._group.broadcast(source, own))
        return bytes(found)
