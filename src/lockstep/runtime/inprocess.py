"""`inprocess`: one process, k devices, a worker thread for each.

Every rank's work runs on its own thread, so devices work at the same time: on a CPU each thread is one core's worth of
a device, on GPUs each has a stream of its own. The calling thread only hands work out and waits: a phase is over when
every rank has finished it.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np

from lockstep.backends import Backend, Recorder, Tensor
from lockstep.backends.hardware import pin_to_core
from lockstep.data.dataset import map_leaves
from lockstep.core.device import Device
from lockstep.runtime.engine import Batch, Exchanged, Gathered, Gradients, Replica
from lockstep.runtime.barrier import Meeting
from lockstep.runtime.interpreter import OwnShards, add_up_leaves, compute_beside_each_other, compute_own_shards
from lockstep.runtime.rank_thread import RankThread
from lockstep.runtime.thread_transport import Traffic
from lockstep.core.errors import Late, LockstepError, RankError
from lockstep.schedules.exchanges import schedule_for
from lockstep.schedules.exchanges.collective import in_order
from lockstep.core.layout import Array
from lockstep.core.entry_points import source_line_of, user_source_line
from lockstep.partition.balance import Balance
from lockstep.partition.buckets import BUCKET_MB, places_of_parts
from lockstep.core.tracing import Trace, span, traced


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
        bucket_mb: float = BUCKET_MB,
        pins: bool = False,
    ) -> None:
        self.backend, self.devices, self.exchange_name, self.timeout = backend, devices, exchange, timeout
        self.balance, self._records, self._bucket_mb = balance or Balance(), records, bucket_mb
        self._pins = pins and devices[0].kind == "cpu"
        self.recorder: Recorder | None = None
        self.is_recording = False
        self.traces: list[Trace] = []  # one for each rank, while a run is traced
        self.num_ranks = len(devices)
        self.local_ranks = range(self.num_ranks)
        self._undo = ExitStack()
        self._workers: list[RankThread] = []
        self._beside: list[RankThread] = []  # one for each rank, which exchanges while the rank computes
        self._step = 0
        self._late: list[int] = []  # ranks whose threads hang

    def __enter__(self) -> Self:
        self._undo.enter_context(self.backend.session(self.devices))
        try:
            for rank in self.local_ranks:
                self._workers.append(RankThread(f"lockstep-rank-{rank}"))
                self._undo.callback(self._end, rank)
            self._undo.callback(self._end_beside)
            self.each("start", lambda rank, device: self.backend.start_worker(device))
            if self._pins:
                self.each("start", lambda rank, device: pin_to_core(rank, self.num_ranks))
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

    def _end_beside(self) -> None:
        for thread in self._beside:
            thread.end(waits=not self._late)
        self._beside.clear()

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

        return self._results(
            phase,
            self._workers,
            [w.submit(run, r, *entries) for r, (w, *entries) in enumerate(zip(self._workers, *lists, strict=True))],
        )

    def _results(self, phase: str, threads: list[RankThread], futures: "list[Future[Any]]") -> list[Any]:
        """What the threads of all ranks give back; an error is the first rank's that has one of its own."""
        done: SimpleQueue[Future[Any]] = SimpleQueue()
        for future in futures:
            future.add_done_callback(done.put)
        try:
            first = done.get()
            if not isinstance(first.exception(), threading.BrokenBarrierError):
                began = time.monotonic()  # the others are waited for from now on
                for _ in futures[1:]:
                    done.get(timeout=self.timeout and max(0.0, began + self.timeout - time.monotonic()))
        except Empty:
            pass
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
            raise Late(self._say_who_is_late(phase, threads))
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

    def _say_who_is_late(self, phase: str, threads: list[RankThread]) -> str:
        frames = sys._current_frames()
        places = [source_line_of(frames.get(threads[rank].thread.ident or 0)) for rank in self._late]
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
            trace.start_step(step)
        ranges = self.balance.ranges(len(shards), self.num_ranks)
        if self.is_recording and self.recorder is not None:
            return self._record_shards(self.recorder, replicas, step, batch, shards, ranges)
        schedule = schedule_for(self.exchange_name, ranges)
        places = places_of_parts(replicas[0].size, self._bucket_mb, self.num_ranks)
        traffic = Traffic(self.backend, self.devices, schedule, places, self.timeout)
        busy = [rank for rank in self.local_ranks if ranges[rank]]
        meeting = Meeting(self.backend, len(busy), self.timeout)

        def meet(rank: int, device: Device, what: str, own: list[Tensor]) -> list[Tensor]:
            return meeting.meet(busy.index(rank), device, what, own)

        def cancel() -> None:
            meeting.cancel()
            traffic.cancel()

        def work(rank: int, device: Device, replica: Replica) -> tuple[OwnShards, Tensor]:
            own = compute_own_shards(
                self.backend,
                device,
                replica,
                step,
                batch,
                rank,
                shards,
                ranges[rank],
                partial(meet, rank, device),
                traffic.way_out(rank),
                cancel,
            )
            return own, None if traffic.is_beside else traffic.travel(rank)

        beside = self._start_beside(traffic) if traffic.is_beside else []
        try:
            own, totals = zip(*self.each("forward and backward", work, replicas), strict=True)
        except BaseException:
            cancel()
            raise

        def wait_for_totals() -> list[Tensor]:
            return self._results("exchange", self._beside, beside) if beside else list(totals)

        return Gradients(ranges, wait_for_totals, *map(list, zip(*own, strict=True)))

    def _start_beside(self, traffic: Traffic) -> "list[Future[Tensor]]":
        """Threads that exchange while ranks compute; each waits for what its rank lets go of."""
        if not self._beside:
            self._beside += [RankThread(f"lockstep-exchange-{rank}") for rank in self.local_ranks]
            for thread, device in zip(self._beside, self.devices, strict=True):
                thread.submit(self.backend.start_worker, device)

        def exchange(rank: int) -> Tensor:
            with traced(self.traces[rank].beside if self.traces else None):
                return traffic.travel(rank)

        return [thread.submit(exchange, rank) for rank, thread in enumerate(self._beside)]

    def _record_shards(
        self,
        recorder: Recorder,
        replicas: Sequence[Replica],
        step: int,
        batch: Batch,
        shards: list[range],
        ranges: tuple[range, ...],
    ) -> Gradients:
        if batch.gather is not None:
            batch.gather()
        with recorder.fork():
            leaves = self.each(
                "forward and backward",
                lambda rank, device, replica: compute_beside_each_other(
                    recorder, replica, step, batch, rank, shards, ranges[rank]
                ),
                replicas,
            )
        nodes, own = zip(
            *(add_up_leaves(recorder, ranges[rank], len(shards), leaves[rank]) for rank in self.local_ranks),
            strict=True,
        )
        recorder.keep(leaves)

        def exchange() -> list[Tensor]:  # by one thread for all ranks
            schedule, whole = schedule_for(self.exchange_name, ranges), [range(replicas[0].size)]
            traffic = Traffic(self.backend, self.devices, schedule, whole, None)
            for rank in self.local_ranks:
                traffic.way_out(rank).leave(0, partial(nodes.__getitem__, rank))
            for number, round_ in in_order(len(whole), len(schedule.rounds)):
                for rank in self.local_ranks:
                    traffic.go_on(rank, number, round_)
            return [traffic.total(rank) for rank in self.local_ranks]

        return Gradients(ranges, exchange, *map(list, zip(*own, strict=True)))

    def exchange(self, gradients: Gradients) -> Exchanged:
        if not self.is_recording:
            self.balance.measured(gradients.ranges, gradients.seconds)
        return Exchanged(
            totals=gradients.totals(),
            losses=[loss for of_rank in gradients.losses for loss in of_rank],
            rows=[row for of_rank in gradients.rows for row in of_rank],
            used=frozenset().union(*gradients.used),
        )

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
