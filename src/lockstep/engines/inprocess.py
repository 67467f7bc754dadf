"""`inprocess`: one process, k devices, a worker thread for each.

Every rank's work runs on its own thread, so devices work at the same time: on a CPU each thread is one core's worth of
a device, on GPUs each has a stream of its own. The calling thread only hands work out and waits: a phase is over when
every rank has finished it.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import numpy as np

from lockstep.backends import Backend, Recorder, Tensor
from lockstep.data.dataset import map_leaves
from lockstep.device import Device
from lockstep.engines.engine import Batch, Exchanged, Gathered, Gradients, Replica
from lockstep.engines.meeting import Meeting
from lockstep.engines.rank import (
    Held,
    OwnShards,
    add_up_leaves,
    compute_beside_each_other,
    compute_own_shards,
    cut_into_chunks,
    take_part,
    total_of,
)
from lockstep.engines.threads import RankThread
from lockstep.errors import Late, LockstepError, RankError
from lockstep.exchange import schedule_for
from lockstep.exchange.schedule import Schedule
from lockstep.layout import Array
from lockstep.named import source_line_of, user_source_line
from lockstep.split.balance import Balance
from lockstep.trace import Trace, span, traced


class InProcess:
    """All ranks in this process. `balance` says which shards a rank gets; the bits do not depend on it."""

    def __init__(
        self,
        backend: Backend,
        devices: list[Device],
        exchange: str = "sharded",
        balance: Balance | None = None,
        timeout: float | None = None,
        records: bool = False,
    ) -> None:
        self.backend, self.devices, self.exchange_name, self.timeout = backend, devices, exchange, timeout
        self.balance, self._records = balance or Balance(), records
        self.recorder: Recorder | None = None
        self.is_recording = False
        self.traces: list[Trace] = []  # one for each rank, while a run is traced
        self.num_ranks = len(devices)
        self.local_ranks = range(self.num_ranks)
        self._undo = ExitStack()
        self._workers: list[RankThread] = []
        self._step = 0
        self._late: list[int] = []  # ranks whose threads hang

    def __enter__(self) -> Self:
        self._undo.enter_context(self.backend.session(self.devices))
        try:
            for rank in self.local_ranks:
                self._workers.append(RankThread(f"lockstep-rank-{rank}"))
                self._undo.callback(self._end, rank)
            self.each("start", lambda rank, device: self.backend.start_worker(device))
            self.recorder = self.backend.recorder(self.devices) if self._records else None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker threads and puts the framework's settings back. Twice does no harm."""
        self.recorder = None
        self._undo.close()
        self._workers.clear()

    def _end(self, rank: int) -> None:
        self._workers[rank].end(waits=rank not in self._late)

    def each(self, phase: str, work: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """`work(rank, device, ...)` for every rank at the same time, each on its own thread."""
        if self.is_recording:
            return self._each_in_turn(phase, work, *lists)

        def run(rank: int, *entries: Any) -> Any:
            device = self.devices[rank]
            with traced(self.traces[rank] if self.traces else None, lambda: self.backend.synchronize(device)):
                result = work(rank, device, *entries)
                self.backend.synchronize(device)
            return result

        futures = [
            w.submit(run, r, *entries) for r, (w, *entries) in enumerate(zip(self._workers, *lists, strict=True))
        ]
        try:
            first, _ = wait(futures, return_when=FIRST_COMPLETED)
            if not all(isinstance(future.exception(), threading.BrokenBarrierError) for future in first):
                wait(futures, timeout=self.timeout)  # the others, who are waited for from now on
        except KeyboardInterrupt:  # at once: nobody waits for the threads
            self._late = [rank for rank, future in enumerate(futures) if not future.done()]
            raise
        self._late = [rank for rank, future in enumerate(futures) if not future.done()]
        errors = [(rank, e) for rank, f in enumerate(futures) if f.done() and (e := f.exception()) is not None]
        for rank, error in errors:
            if isinstance(error, threading.BrokenBarrierError):  # it only waited for another
                continue
            if isinstance(error, LockstepError):
                raise error
            raise RankError(rank, self.devices[rank], phase, error, user_source_line(error))
        if self._late:
            raise Late(self._say_who_is_late(phase))
        return [future.result() for future in futures]

    def _each_in_turn(self, phase: str, work: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """`work` for every rank on this thread: a recorder is told what to do, and does not do it yet."""
        results = []
        for rank, device in enumerate(self.devices):
            try:
                results.append(work(rank, device, *(entries[rank] for entries in lists)))
            except LockstepError:
                raise
            except Exception as problem:
                raise RankError(rank, device, phase, problem, user_source_line(problem)) from problem
        return results

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """While it is entered, this thread works for all ranks, and waits for none of them."""
        with recorder.stream():
            self.is_recording = True
            try:
                yield
            finally:
                self.is_recording = False

    def _say_who_is_late(self, phase: str) -> str:
        frames = sys._current_frames()
        places = [source_line_of(frames.get(self._workers[rank].thread.ident or 0)) for rank in self._late]
        who = "; ".join(
            f"rank {rank} ({self.devices[rank]}) is in {phase} of step {self._step}, at {line or 'its end'}"
            for rank, line in zip(self._late, places, strict=True)
        )
        return f"after {self.timeout:g} s that the others waited: {who}. A longer --timeout waits longer"

    def enter(self, phase: str) -> None:
        """Nobody is elsewhere."""

    def replicate(self, make: Callable[[Device], Any]) -> list[Any]:
        return self.each("replicate", lambda rank, device: make(device))

    def place(self, array: Array) -> list[Tensor]:
        probe = np.zeros(1, np.float32)  # logical devices may share one memory: see where a tensor for each ends up
        homes = self.each("place", lambda rank, device: self.backend.device_of(self.backend.from_numpy(probe, device)))
        first = [homes.index(home) for home in homes]
        placed = self.each(
            "place", lambda rank, device: self.backend.from_numpy(array, device) if first[rank] == rank else None
        )
        return [placed[rank] for rank in first]

    def forward_backward(self, replicas: Sequence[Replica], step: int, batch: Batch, shards: list[range]) -> Gradients:
        self._step = step
        for trace in self.traces:
            trace.step = step
        ranges = self.balance.ranges(len(shards), self.num_ranks)
        if self.is_recording and self.recorder is not None:
            return self._record_shards(self.recorder, replicas, step, batch, shards, ranges)
        busy = [rank for rank in self.local_ranks if ranges[rank]]
        meeting = Meeting(self.backend, len(busy), self.timeout)

        def work(rank: int, device: Device, replica: Replica) -> OwnShards:
            def meet(what: str, own: list[Tensor]) -> list[Tensor]:
                return meeting.meet(busy.index(rank), device, what, own)

            own = ranges[rank]
            return compute_own_shards(
                self.backend, device, replica, step, batch, rank, shards, own, meet, meeting.cancel
            )

        return Gradients(ranges, *map(list, zip(*self.each("forward and backward", work, replicas), strict=True)))

    def _record_shards(
        self,
        recorder: Recorder,
        replicas: Sequence[Replica],
        step: int,
        batch: Batch,
        shards: list[range],
        ranges: tuple[range, ...],
    ) -> Gradients:
        with recorder.fork():
            leaves = self.each(
                "forward and backward",
                lambda rank, device, replica: compute_beside_each_other(
                    recorder, replica, step, batch, rank, shards, ranges[rank]
                ),
                replicas,
            )
        own = [add_up_leaves(recorder, ranges[rank], len(shards), leaves[rank]) for rank in self.local_ranks]
        recorder.keep(leaves)
        return Gradients(ranges, *map(list, zip(*own, strict=True)))

    def exchange(self, gradients: Gradients) -> Exchanged:
        if not self.is_recording:
            self.balance.measured(gradients.ranges, gradients.seconds)
        schedule = schedule_for(self.exchange_name, gradients.ranges)
        size = next(len(vector) for nodes in gradients.nodes for vector in nodes.values())
        held = [cut_into_chunks(self.backend, nodes, size, schedule) for nodes in gradients.nodes]
        return Exchanged(
            totals=self._in_rounds(schedule, held),
            losses=[loss for of_rank in gradients.losses for loss in of_rank],
            rows=[row for of_rank in gradients.rows for row in of_rank],
            used=frozenset().union(*gradients.used),
        )

    def _in_rounds(self, schedule: Schedule, held: list[Held]) -> list[Tensor]:
        """The totals. A round begins when every rank has finished the one before."""
        if self.is_recording:
            for round_ in schedule.rounds:
                for rank, device in enumerate(self.devices):
                    take_part(self.backend, device, rank, round_, held)
            return [total_of(self.backend, own, schedule) for own in held]
        all_done = threading.Barrier(self.num_ranks, timeout=self.timeout)

        def work(rank: int, device: Device) -> Tensor:
            try:
                for round_ in schedule.rounds:
                    with span("exchange"):
                        take_part(self.backend, device, rank, round_, held)
                        self.backend.synchronize(device)
                    all_done.wait()
                with span("exchange"):
                    return total_of(self.backend, held[rank], schedule)
            except BaseException:
                all_done.abort()  # the others would wait
                raise

        return self.each("exchange", work)

    def update(self, replicas: Sequence[Replica], step: int, exchanged: Exchanged, shards: list[range]) -> None:
        def apply(rank: int, device: Device, replica: Replica, total: Tensor) -> None:
            rows = [map_leaves(row, lambda tensor: self.backend.copy_to(tensor, device)) for row in exchanged.rows]
            with span("update"):
                replica.update(step, total, Gathered([len(shard) for shard in shards], rows, exchanged.used))

        self.each("update", apply, replicas, exchanged.totals)

    def gather(self, values: list[Any]) -> list[Any]:
        return values

    def share(self, source: int, make: Callable[[], bytes]) -> bytes:
        return make()
