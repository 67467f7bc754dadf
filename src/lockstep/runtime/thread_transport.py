"""Ranks that are threads of one process: values are handed over by reference; who receives one copies it, if at all."""

from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.core.tracing import WAIT, SpanName, span
from lockstep.data.dataset import map_leaves
from lockstep.replicas.replica import StageTensors
from lockstep.runtime.engine import RankResult
from lockstep.runtime.transport import Cancelled, GroupKey, TransferGroup, check_same_layer
from lockstep.schedules.instructions import CHANNELS, GRADIENTS


class RankQueues:
    """A queue from every rank to every other: `SimpleQueue` wakes who waits sooner than the locks of `threading` do."""

    def __init__(self, num_ranks: int, timeout: float | None) -> None:
        self.timeout = timeout
        self._from_to: list[list[SimpleQueue[Any]]] = [
            [SimpleQueue() for _ in range(num_ranks)] for _ in range(num_ranks)
        ]

    def put(self, source: int, target: int, message: Any) -> None:
        """Never waits."""
        self._from_to[source][target].put(message)

    def get(self, source: int, target: int) -> Any:
        """The next message; waits for it until the deadline."""
        try:
            message = self._from_to[source][target].get(timeout=self.timeout)
        except Empty:
            raise Cancelled from None
        if message is Cancelled:
            raise Cancelled
        return message

    def cancel(self) -> None:
        """Wakes all who wait, now or later."""
        for queues in self._from_to:
            for queue in queues:
                queue.put(Cancelled)


class ThreadGroup:
    """What the ranks of one schedule share: queues for gradients, results, and tensors in mid-forward."""

    def __init__(
        self,
        backend: Backend,
        devices: Sequence[Device],
        memories: Sequence[Device],
        timeout: float | None = None,
        overlaps: bool = False,
    ) -> None:
        """`memories` says in which memory each device's tensors are.

        Where the exchange `overlaps` the backward pass, gradients are waited for from the start of a step: whoever
        waits for the exchange has the deadline, and they have none.
        """
        self.backend, self.devices, self.memories = backend, devices, memories
        without = {GRADIENTS} if overlaps else set()
        self.values = {c: RankQueues(len(devices), None if c in without else timeout) for c in CHANNELS}
        self.results, self.tensors = (RankQueues(len(devices), timeout) for _ in range(2))

    def transport(self, rank: int) -> "ThreadTransport":
        """The transport of one rank."""
        return ThreadTransport(self, rank)

    def cancel(self) -> None:
        """Wakes all who wait, now or later."""
        for queues in (*self.values.values(), self.results, self.tensors):
            queues.cancel()


class ThreadTransport:
    """One rank's connections to the other threads."""

    def __init__(self, shared: ThreadGroup, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._backend, self._device = shared.backend, shared.devices[rank]
        self._others = [other for other in range(len(shared.devices)) if other != rank]
        self._receives: dict[GroupKey, list[tuple[int, Tensor | None]]] = {}

    def shares_memory_with(self, rank: int) -> bool:
        return self._shared.memories[rank] == self._shared.memories[self._rank]

    def start(self, group: TransferGroup) -> None:
        if group.sends:
            self._backend.synchronize(self._device)  # whoever reads them must find them finished
        for target, tensor in group.sends:
            self._shared.values[group.key.channel].put(self._rank, target, tensor)
        self._receives[group.key] = group.receives

    def finish(self, key: GroupKey) -> list[Tensor | StageTensors]:
        found = []
        for source, memory in self._receives.pop(key):
            with span(WAIT):
                tensor = self._shared.values[key.channel].get(source, self._rank)
            for value in tensor.values if isinstance(tensor, StageTensors) else [tensor]:
                self._backend.record_stream(value)  # the sender may be the first to let go of it
            if isinstance(tensor, StageTensors):
                if not self.shares_memory_with(source):
                    tensor = tensor._replace(
                        values=[self._backend.copy_activation(v, self._device) for v in tensor.values]
                    )
            elif memory is not None:
                tensor = self._backend.assign(memory, tensor)
            elif not self.shares_memory_with(source):
                tensor = self._backend.copy_to(tensor, self._device)
            found.append(tensor)
        return found

    def all_reduce(self, own: Tensor) -> Tensor:
        raise NotImplementedError("native is refused where ranks are threads")

    def all_gather(self, own: RankResult) -> Callable[[], list[RankResult]]:
        if own.buffers or own.weights:
            self._backend.synchronize(self._device)  # whoever reads them must find them finished
        for other in self._others:
            self._shared.results.put(self._rank, other, own)
        found: list[RankResult] = []

        def wait() -> list[RankResult]:
            if not found:
                with span(WAIT):
                    theirs = {other: self._shared.results.get(other, self._rank) for other in self._others}
                found.extend(own if rank == self._rank else self._here(theirs[rank]) for rank in self._all())
            return found

        return wait

    def all_gather_tensors(self, ranks: Sequence[int], layer: str, own: list[Tensor]) -> list[Tensor]:
        self._backend.synchronize(self._device)
        others = [rank for rank in ranks if rank != self._rank]
        for other in others:
            self._shared.tensors.put(self._rank, other, (layer, own))
        with span(SpanName.EXCHANGE):
            theirs = {self._rank: (layer, own)} | {o: self._shared.tensors.get(o, self._rank) for o in others}
            check_same_layer(layer, [theirs[rank][0] for rank in ranks])
            found = [self._backend.copy_to(tensor, self._device) for rank in ranks for tensor in theirs[rank][1]]
            self._backend.synchronize(self._device)  # from here on, the others' memory may be used again
        return found

    def cancel(self) -> None:
        self._shared.cancel()

    def _all(self) -> range:
        return range(len(self._shared.devices))

    def _here(self, result: RankResult) -> RankResult:
        buffers = [
            map_leaves(one, lambda tensor: self._backend.copy_to(tensor, self._device)) for one in result.buffers
        ]
        return result._replace(buffers=buffers)
