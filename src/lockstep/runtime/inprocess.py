"""`inprocess`: one process, k devices, a worker thread for each.

Every rank's work runs on its own thread, so devices work at the same time: on a CPU each thread computes on one core,
on GPUs each has a stream of its own. The calling thread only submits work and waits for all ranks.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np

from lockstep.backends import Backend, Tensor
from lockstep.backends.hardware import pin_to_core
from lockstep.core.device import Device
from lockstep.core.errors import RankTimeout
from lockstep.core.layout import Array
from lockstep.core.source_lines import source_line_of
from lockstep.core.tracing import Trace, traced
from lockstep.replicas.replica import Evaluated, Replica
from lockstep.runtime.engine import Position, Rank, StepInput, StepResult
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.rank_errors import errors_named
from lockstep.runtime.rank_thread import RankThread
from lockstep.runtime.thread_transport import ThreadGroup
from lockstep.runtime.transport import Cancelled
from lockstep.schedules.instructions import Schedule

GRACE_SECONDS = 1.0  # for ranks that only waited to notice the cancellation


class InProcess:
    """All ranks in this process. With `pins`, ranks that take up all cores of the CPU have one each.

    It has a session of the framework from its start to its end, or the caller has one whenever it calls.
    """

    def __init__(
        self,
        backend: Backend,
        devices: list[Device],
        timeout: float | None = None,
        pins: bool = False,
        *,
        has_session: bool = True,
    ) -> None:
        self.backend, self.devices, self.timeout = backend, devices, timeout
        self._pins, self._has_session = pins and devices[0].kind == "cpu", has_session
        self.num_ranks = len(devices)
        self.local_ranks = range(self.num_ranks)
        self.traces: list[Trace] = []  # one for each rank, while a run is traced
        self._captures: list[Any] = []  # one for each rank, where each captures its own shards
        self.memories: list[Device] = []  # where each rank's tensors are: logical CPU devices may share one memory
        self._positions = [Position() for _ in devices]
        self._undo = ExitStack()
        self._workers: list[RankThread] = []
        self._comm_threads: list[RankThread] = []  # for exchanges that overlap with the backward pass
        self._exchanges: dict[int, Future[Any]] = {}  # what they do, by rank
        self._late: list[int] = []  # ranks whose threads hang
        self._schedule: Schedule | None = None
        self._group: ThreadGroup
        self._interpreters: list[Interpreter] = []

    def __enter__(self) -> Self:
        if self._has_session:
            self._undo.enter_context(self.backend.session(self.devices))
        try:
            for rank in self.local_ranks:
                self._workers.append(RankThread(f"lockstep-rank-{rank}", rank))
            self._undo.callback(self._end_threads)
            self.memories = self.each("start", self._start_worker)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker threads and puts the framework's settings back. Twice does no harm."""
        self._schedule, self._interpreters, self._captures = None, [], []
        self._undo.close()

    def _start_worker(self, rank: int, device: Device) -> Device:
        self.backend.start_worker(device)
        if self._pins:
            pin_to_core(rank, self.num_ranks)
        return self.backend.device_of(self.backend.from_numpy(np.zeros(1, np.float32), device))

    def _end_threads(self) -> None:
        for rank, thread in enumerate(self._workers):
            thread.end(waits=rank not in self._late)
        for thread in self._comm_threads:
            thread.end(waits=not self._late)
        self._workers, self._comm_threads = [], []

    def run(self, schedule: Schedule, replicas: Sequence[Replica], work: StepInput) -> StepResult:
        if schedule is not self._schedule:
            self._connect(schedule)
        for trace in self.traces:
            trace.start_step(work.step)
        for position in self._positions:
            position.step = work.step
        ranks = zip(self._workers, self._interpreters, replicas, strict=True)
        futures = [w.submit(i.run, work, replica, self._start_exchange) for w, i, replica in ranks]
        try:
            return StepResult.of_ranks(schedule, self._results(futures)[0])
        except BaseException:
            self._schedule = None  # those that waited for each other have given up: the next step starts anew
            raise

    def evaluate(self, schedule: Schedule, replicas: Sequence[Replica], work: StepInput) -> list[list[Evaluated]]:
        if schedule is not self._schedule:
            self._connect(schedule)
        ranks = zip(self._workers, self._interpreters, replicas, strict=True)
        try:
            return self._results([w.submit(i.evaluate, work, replica) for w, i, replica in ranks])
        except BaseException:
            self._schedule = None
            raise

    def use_captures(self, captures: list[Any]) -> None:
        self._captures, self._schedule = captures, None

    def _connect(self, schedule: Schedule) -> None:
        """Interpreters for a schedule, connected to each other; kept while the schedule stays the same."""
        self._group = ThreadGroup(self.backend, self.devices, self.memories, self.timeout, schedule.overlaps)
        self._interpreters = []
        for rank, device in enumerate(self.devices):
            trace = self.traces[rank] if self.traces else None
            own = Rank(rank, device, self.backend, self._positions[rank], trace)
            capture = self._captures[rank] if self._captures else None
            self._interpreters.append(Interpreter(own, schedule, self._group.transport(rank), capture=capture))
        if schedule.overlaps and not self._comm_threads:
            for rank, device in enumerate(self.devices):
                self._comm_threads.append(RankThread(f"lockstep-exchange-{rank}"))
                self._comm_threads[rank].submit(self.backend.start_worker, device).result()
        self._schedule = schedule

    def _start_exchange(self, interpreter: Interpreter) -> Callable[[], Any]:
        """Runs a rank's exchange on its comm thread; the function waits for it."""
        rank, trace = interpreter.rank.number, interpreter.rank.trace

        def work() -> None:
            try:
                with traced(trace and trace.exchange):
                    interpreter.exchange()
            except BaseException:
                self._group.cancel()
                raise

        future = self._exchanges[rank] = self._comm_threads[rank].submit(work)

        def wait_for_exchange() -> None:
            if not wait([future], self.timeout).done:
                raise Cancelled
            future.result()

        return wait_for_exchange

    def each(self, phase: str, work: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """`work(rank, device, ...)` for every rank at the same time, each on its own thread."""

        def run(rank: int, *entries: Any) -> Any:
            device, position = self.devices[rank], self._positions[rank]
            position.phase, trace = phase, self.traces[rank] if self.traces else None
            with errors_named(rank, device, position), traced(trace, lambda: self.backend.synchronize(device)):
                result = work(rank, device, *entries)
                self.backend.synchronize(device)
            return result

        return self._results(
            [w.submit(run, r, *entries) for r, (w, *entries) in enumerate(zip(self._workers, *lists, strict=True))]
        )

    def _results(self, futures: "list[Future[Any]]") -> list[Any]:
        """What the threads of all ranks return; an error is the first rank's that has one of its own."""
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        for future in futures:
            future.add_done_callback(done.put)
        deadline, is_cancelled = None, False
        try:
            for _ in futures:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                first = done.get(timeout=left)
                if not is_cancelled and isinstance(first.exception(), Cancelled):
                    is_cancelled, deadline = True, time.monotonic() + GRACE_SECONDS
                elif deadline is None and self.timeout is not None:  # the others are waited for from now on
                    deadline = time.monotonic() + self.timeout
        except Empty:
            pass
        finally:  # also on an interrupt, which does not wait for the threads
            hung = wait(self._exchanges.values(), GRACE_SECONDS).not_done if is_cancelled else set()
            self._late = [r for r, future in enumerate(futures) if not future.done() or self._exchanges.get(r) in hung]
        errors = [error for future in futures if future.done() and (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, Cancelled):
                raise error
        if self._late or errors:
            raise RankTimeout(f"the others waited {self.timeout or 0:g} s (--timeout): {self._stragglers()}.")
        return [future.result() for future in futures]

    def _stragglers(self) -> str:
        frames, said = sys._current_frames(), []
        for rank in self._late:
            is_in_exchange = rank in self._exchanges and not self._exchanges[rank].done()
            thread = (self._comm_threads if is_in_exchange else self._workers)[rank].thread
            at, position = source_line_of(frames.get(thread.ident or 0)) or "its end", self._positions[rank]
            said.append(f"rank {rank} ({self.devices[rank]}) is in {position.phase} of step {position.step}, at {at}")
        who = "; ".join(said)
        return f"{who or 'a rank arrived too late'}. If it is only slow, use a larger --timeout"

    def set_call(self, call: str) -> None:
        """One process makes one call."""

    def set_phase(self, phase: str) -> None:
        """All ranks are in this process: nobody waits elsewhere."""

    def copy_to_devices(self, array: Array) -> list[Tensor]:
        first = [self.memories.index(memory) for memory in self.memories]
        placed = self.each(
            "copying data to the device",
            lambda rank, device: self.backend.from_numpy(array, device) if first[rank] == rank else None,
        )
        return [placed[rank] for rank in first]

    def all_gather(self, values: list[Any]) -> list[Any]:
        return values

    def broadcast(self, source: int, make: Callable[[], bytes]) -> bytes:
        return make()
