"""Where the ranks of one process meet in mid-phase: each brings its shards' tensors and leaves with everybody's."""

import threading
from queue import Empty, SimpleQueue

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.core.errors import RunError


class Arrivals:
    """A barrier, to be passed many times. It is made of queues, which wake who waits sooner than `threading`'s own."""

    def __init__(self, num_ranks: int, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._from_to: list[list[SimpleQueue[bool]]] = [
            [SimpleQueue() for _ in range(num_ranks)] for _ in range(num_ranks)
        ]

    def wait(self, rank: int) -> None:
        """Returns when all others have come as often as this rank."""
        others = [other for other in range(len(self._from_to)) if other != rank]
        for other in others:
            self._from_to[rank][other].put(True)
        for other in others:
            try:
                has_come = self._from_to[other][rank].get(timeout=self._timeout)
            except Empty:
                has_come = False
            if not has_come:
                self.cancel()
                raise threading.BrokenBarrierError

    def cancel(self) -> None:
        """Sends everybody home who waits, now or later."""
        for queues in self._from_to:
            for queue in queues:
                queue.put(False)


class Meeting:
    """A meeting place for the ranks that have shards. A rank that fails must `cancel` it: the others would wait."""

    def __init__(self, backend: Backend, num_ranks: int, timeout: float | None = None) -> None:
        self._backend = backend
        self._barrier = threading.Barrier(num_ranks, timeout=timeout)
        self._brought: dict[tuple[int, int], tuple[str, list[Tensor]]] = {}  # (round, rank)
        self._num_rounds = [0] * num_ranks

    def meet(self, number: int, device: Device, what: str, own: list[Tensor]) -> list[Tensor]:
        """All shards' tensors in shard order, on `device`. `what` must be the same for all ranks."""
        round_ = self._num_rounds[number]
        self._num_rounds[number] += 1
        self._brought[round_, number] = what, own
        self._backend.synchronize(device)  # whoever copies must find them finished
        self._barrier.wait()
        met = [self._brought[round_, other] for other in range(len(self._num_rounds))]
        self._brought.pop((round_ - 1, number), None)  # by now everybody has copied the round before
        for other, _ in met:
            if other != what:
                raise RunError(
                    f"Shards of one batch take different ways through the model: one is at {what}, another at {other}. "
                    f"Statistics of the whole batch need all of them at the same place."
                )
        return [self._backend.copy_to(tensor, device) for _, brought in met for tensor in brought]

    def cancel(self) -> None:
        """Sends everybody home who waits, now or later."""
        self._barrier.abort()
