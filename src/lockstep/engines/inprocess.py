"""`inprocess`: one process, k devices, a worker thread for each.

Every rank's work runs on its own thread, so devices work at the same time: on a CPU each thread is one core's worth of
a device, on GPUs each has a stream of its own. The calling thread only hands work out and waits: a phase is over when
every rank has finished it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

from lockstep.backends import Backend, LossSum, Tensor
from lockstep.device import Device
from lockstep.engines.engine import Batch, Gradients
from lockstep.engines.rank import add_up_own_shards, cut_into_chunks, take_part, total_of, user_source_line
from lockstep.errors import LockstepError, RankError
from lockstep.exchange import schedule_for
from lockstep.layout import Array, Layout
from lockstep.split.ranks import split_over_ranks


class InProcess:
    """All ranks in this process. `assign` says which shards a rank gets; the bits do not depend on it."""

    def __init__(
        self,
        backend: Backend,
        devices: list[Device],
        exchange: str = "sharded",
        assign: Callable[[int, int], list[range]] = split_over_ranks,
    ) -> None:
        self.backend, self.devices, self.exchange_name, self.assign = backend, devices, exchange, assign
        self.num_ranks = len(devices)
        self.local_ranks = range(self.num_ranks)
        self._undo = ExitStack()
        self._workers: list[ThreadPoolExecutor] = []

    def __enter__(self) -> Self:
        self._undo.enter_context(self.backend.session(self.devices))
        try:
            for rank in self.local_ranks:
                worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"lockstep-rank-{rank}")
                self._workers.append(worker)
                self._undo.callback(worker.shutdown, wait=True, cancel_futures=True)
            self.each("start", lambda rank, device: self.backend.start_worker(device))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker threads and puts the framework's settings back. Twice does no harm."""
        self._undo.close()
        self._workers.clear()

    def each(self, phase: str, work: Callable[..., Any], *lists: list[Any]) -> list[Any]:
        """`work(rank, device, ...)` for every rank at the same time, each on its own thread."""

        def run(rank: int, *entries: Any) -> Any:
            result = work(rank, self.devices[rank], *entries)
            self.backend.synchronize(self.devices[rank])
            return result

        futures = [
            w.submit(run, r, *entries) for r, (w, *entries) in enumerate(zip(self._workers, *lists, strict=True))
        ]
        wait(futures)
        for rank, future in enumerate(futures):
            error = future.exception()
            if isinstance(error, LockstepError):
                raise error
            if error is not None:
                raise RankError(rank, self.devices[rank], phase, error, user_source_line(error))
        return [future.result() for future in futures]

    def replicate(self, flat: Array) -> list[Tensor]:
        def copy(rank: int, device: Device) -> Tensor:
            return self.backend.copy_to(self.backend.from_numpy(flat, device), device)

        return self.each("replicate", copy)

    def place(self, array: Array) -> list[Tensor]:
        probe = np.zeros(1, np.float32)  # logical devices may share one memory: see where a tensor for each ends up
        homes = self.each("place", lambda rank, device: self.backend.device_of(self.backend.from_numpy(probe, device)))
        first = [homes.index(home) for home in homes]
        placed = self.each(
            "place", lambda rank, device: self.backend.from_numpy(array, device) if first[rank] == rank else None
        )
        return [placed[rank] for rank in first]

    def forward_backward(
        self, loss_sum: LossSum, layout: Layout, replicas: list[Tensor], batch: Batch, shards: list[range]
    ) -> Gradients:
        ranges = tuple(self.assign(len(shards), self.num_ranks))

        def work(rank: int, device: Device, flat: Tensor) -> Any:
            return add_up_own_shards(self.backend, loss_sum, layout, flat, batch, rank, shards, own=ranges[rank])

        results = self.each("forward and backward", work, replicas)
        return Gradients(ranges, [nodes for nodes, _ in results], [losses for _, losses in results])

    def exchange(self, gradients: Gradients) -> list[Tensor]:
        schedule = schedule_for(self.exchange_name, gradients.ranges)
        size = next(len(vector) for nodes in gradients.nodes for vector in nodes.values())
        held = [cut_into_chunks(self.backend, nodes, size, schedule) for nodes in gradients.nodes]
        for round_ in schedule.rounds:
            self.each("exchange", lambda rank, device, r=round_: take_part(self.backend, device, rank, r, held))
        return self.each("exchange", lambda rank, device, own: total_of(self.backend, own, schedule), held)

    def update(
        self,
        rule: Callable[[Tensor, Tensor], Tensor],
        replicas: list[Tensor],
        totals: list[Tensor],
        num_samples: int,
    ) -> list[Tensor]:
        def apply(rank: int, device: Device, flat: Tensor, total: Tensor) -> Tensor:
            return rule(flat, total / num_samples)

        return self.each("update", apply, replicas, totals)

    def gather(self, values: list[Any]) -> list[Any]:
        return values
