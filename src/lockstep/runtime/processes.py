"""`processes`: one process a device. This process owns one rank, and works for it on its main thread.

The step, the schedules and the tree are those of the other engine; here a transfer goes over a wire.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Self

from lockstep.backends import Backend, Tensor
from lockstep.data.dataset import map_leaves
from lockstep.core.device import Device
from lockstep.runtime.engine import Batch, Exchanged, Gathered, Gradients, Replica
from lockstep.runtime.process_group import Group, tensor_from_plain, tensor_to_plain
from lockstep.runtime.interpreter import compute_own_shards
from lockstep.runtime.rank_thread import RankThread
from lockstep.runtime.launch.heartbeat import Whereabouts
from lockstep.runtime.process_transport import Native, Wire
from lockstep.core.errors import LockstepError, PeersLost, RankError, RunError
from lockstep.schedules.exchanges import NATIVE, schedule_for
from lockstep.core.layout import Array
from lockstep.core.entry_points import user_source_line
from lockstep.core.serialization import pack, unpack
from lockstep.partition.balance import Balance
from lockstep.partition.buckets import BUCKET_MB, places_of_parts
from lockstep.core.tracing import WAIT, Trace, span, traced


class Processes:
    """One of the ranks is in this process; `group` leads to the others."""

    def __init__(
        self,
        backend: Backend,
        devices: list[Device],
        group: Group,
        exchange: str = "sharded",
        balance: Balance | None = None,
        whereabouts: Whereabouts | None = None,
        bucket_mb: float = BUCKET_MB,
    ) -> None:
        self.backend, self.devices, self.exchange_name, self._bucket_mb = backend, devices, exchange, bucket_mb
        self.balance, self.whereabouts = balance or Balance(), whereabouts or Whereabouts()
        self.num_ranks, self.rank = len(devices), group.rank
        self.local_ranks = range(self.rank, self.rank + 1)
        self.device = devices[self.rank]
        self.is_recording = False
        self.traces: list[Trace] = []  # that of this rank, while a run is traced
        self._group = group
        self._wires: dict[tuple[str, tuple[range, ...], int], Wire] = {}  # the last one
        self._beside: RankThread | None = None  # exchanges while this rank computes
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._undo.callback(self._end_beside)  # after the connections, for one of which it may wait
        self._undo.callback(self._group.close)
        try:
            self._undo.enter_context(self.backend.session([self.device]))
            self.each("start", lambda rank, device: self.backend.start_worker(device))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections and puts the framework's settings back. Twice does no harm."""
        for wire in self._wires.values():
            wire.cancel()
        self._wires.clear()
        self._undo.close()

    def _end_beside(self) -> None:
        if self._beside is not None:
            self._beside.end()
            self._beside = None

    def each(self, phase: str, work: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """`work(rank, device, ...)` for this process's rank."""
        self.whereabouts.phase = phase
        try:
            with traced(self.traces[0] if self.traces else None, lambda: self.backend.synchronize(self.device)):
                result = work(self.rank, self.device, *(entries[0] for entries in lists))
                self.backend.synchronize(self.device)
            self.whereabouts.phase = f"what comes after {phase}"  # not on an error: others look for who did not come
        except LockstepError:
            raise
        except (Exception, SystemExit) as problem:
            raise RankError(self.rank, self.device, phase, problem, user_source_line(problem)) from problem
        return [result]

    def enter(self, phase: str) -> None:
        self.whereabouts.phase = phase

    def replicate(self, make: Callable[[Device], Any]) -> list[Any]:
        return self.each("replicate", lambda rank, device: make(device))

    def place(self, array: Array) -> list[Tensor]:
        return self.each("place", lambda rank, device: self.backend.from_numpy(array, device))

    def forward_backward(self, replicas: Sequence[Replica], step: int, batch: Batch, shards: list[range]) -> Gradients:
        self.whereabouts.step = step
        for trace in self.traces:
            trace.start_step(step)
        ranges = self.balance.ranges(len(shards), self.num_ranks)
        busy = [rank for rank in range(self.num_ranks) if ranges[rank]]
        is_cancelled = False

        def meet(what: str, own: list[Tensor]) -> list[Tensor]:
            if is_cancelled:
                raise PeersLost("It cannot be tried without the other ranks.")
            brought = pack({"what": what, "tensors": [tensor_to_plain(tensor) for tensor in own]})
            phase, self.whereabouts.phase = self.whereabouts.phase, "exchange"
            met = [unpack(other, is_strict=False) for other in self._group.gather(brought, busy)]
            self.whereabouts.phase = phase
            for other in met:
                if other["what"] != what:
                    raise RunError(
                        f"Shards of one batch take different ways through the model: one is at {what}, another at "
                        f"{other['what']}. Statistics of the whole batch need all of them at the same place."
                    )
            return [tensor_from_plain(tensor, self._group.place) for other in met for tensor in other["tensors"]]

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True

        def work(rank: int, device: Device, replica: Replica) -> Any:
            own = ranges[rank]
            return compute_own_shards(
                self.backend, device, replica, step, batch, rank, shards, own, meet, way_out, cancel
            )

        wire = self.wire(ranges, replicas[0].size)
        way_out = wire.start()
        beside = self._start_beside(wire) if wire.is_beside else None
        (own,) = self.each("forward and backward", work, replicas)

        def wait_for_total() -> list[Tensor]:
            if beside is None:
                return [wire.travel()]
            with span(WAIT):
                return [beside.result()]

        return Gradients(ranges, wait_for_total, [own.losses], [own.rows], [own.used], [own.seconds])

    def _start_beside(self, wire: Wire) -> "Future[Tensor]":
        """Begins to exchange what leaves by this wire, on a thread beside this one."""
        if self._beside is None:
            self._beside = RankThread(f"lockstep-exchange-{self.rank}")
            self._beside.submit(self.backend.start_worker, self.device)

        def exchange() -> Tensor:
            with traced(self.traces[0].beside if self.traces else None):
                total = wire.travel()
                self.backend.synchronize(self.device)
                return total

        return self._beside.submit(exchange)

    def exchange(self, gradients: Gradients) -> Exchanged:
        (exchanged,) = self.each("exchange", lambda rank, device: self._exchange(gradients))
        return exchanged

    def _exchange(self, gradients: Gradients) -> Exchanged:
        (losses,), (rows,) = gradients.losses, gradients.rows
        said = {
            "losses": losses,
            "rows": [map_leaves(row, tensor_to_plain) for row in rows],
            "used": gradients.used[0],
            "seconds": gradients.seconds[0],
        }
        with span(WAIT):  # for the last one to come
            heard = [unpack(other, is_strict=False) for other in self._group.gather(pack(said))]
        self.balance.measured(gradients.ranges, [other["seconds"] for other in heard])
        return Exchanged(
            totals=gradients.totals(),
            losses=[loss for other in heard for loss in other["losses"]],
            rows=[self._row(row) for other in heard for row in other["rows"]],
            used=frozenset(number for other in heard for number in other["used"]),
        )

    def _row(self, plain: dict[str, Any]) -> dict[str, Tensor]:
        return {name: tensor_from_plain(tensor, self._group.place) for name, tensor in plain.items()}

    def wire(self, ranges: tuple[range, ...], size: int) -> Wire:
        """What exchanges vectors of this size, when ranks have these shards."""
        key = self.exchange_name, ranges, size
        if key not in self._wires:
            places = places_of_parts(size, self._bucket_mb, self.num_ranks)
            is_native = self.exchange_name == NATIVE
            self._wires = {
                key: Native(self._group, size)
                if is_native
                else Wire(self._group, schedule_for(self.exchange_name, ranges), places)
            }
        return self._wires[key]

    def update(self, replicas: Sequence[Replica], step: int, exchanged: Exchanged, shards: list[range]) -> None:
        def apply(rank: int, device: Device, replica: Replica, total: Tensor) -> None:
            with span("update"):
                replica.update(step, total, Gathered([len(shard) for shard in shards], exchanged.rows, exchanged.used))

        self.each("update", apply, replicas, exchanged.totals)
        self.enter("loading of samples")

    def gather(self, values: list[Any]) -> list[Any]:
        (found,) = self.each(
            "exchange",
            lambda rank, device: [unpack(other, is_strict=False) for other in self._group.gather(pack(values[0]))],
        )
        return list(found)

    def share(self, source: int, make: Callable[[], bytes]) -> bytes:
        own = make() if self.rank == source else b""
        (found,) = self.each("exchange", lambda rank, device: self._group.share(source, own))
        return bytes(found)
