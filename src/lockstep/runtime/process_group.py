"""A rank's connections to the others: tensors and bytes over PyTorch's own wires (Gloo, NCCL), with a deadline each.

Only tensors travel; what is not a tensor is packed into one (see `packing.py`). Nothing is ever unpickled.
"""

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.backends.torch import place_of
from lockstep.core.device import Device
from lockstep.runtime.launch.heartbeat import Store
from lockstep.core.errors import BackendError, PeersLost

HEAD = 4096  # bytes of a first message: its length, and as much as fits; as a rule, that is all
LOOPBACK = "127.0.0.1"
MESSAGES = 1 << 30  # the tag of what is no part of a vector
Move = tuple[int, Tensor]  # a rank, and what is sent to it, or where what it sends is written to


def serve_store() -> tuple[Store, int, int]:
    """A store that only this machine can reach, its port, and the descriptor it listens on."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(1024)
        port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
    store = dist.TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=descriptor, wait_for_workers=False)
    return store, port, descriptor


def join_store(host: str, port: int, timeout: float) -> Store:
    """A connection to the store that others have opened."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as problem:
        raise PeersLost(f"The meeting point {host}:{port} cannot be reached: {_first_line(problem)}.") from problem


def store_under(prefix: str, store: Store) -> Store:
    """The part of a store whose keys begin with `prefix`."""
    return dist.PrefixStore(prefix, store)


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`: loopback, unless the user named another machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the network interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def check_can_fork(devices: Sequence[Device]) -> None:
    """Refuses to start workers for GPUs from a process that has begun to use one: they could not."""
    if devices[0].kind == "cuda" and torch.cuda.is_initialized():
        raise BackendError(
            "This process has used a GPU already, so processes that are started from it cannot. Use --engine "
            "inprocess, or start the program with torchrun."
        )


class Group:
    """The ranks that work together. Any error closes it: the others then notice, and all of them can meet anew."""

    def __init__(self, store: Store, rank: int, devices: Sequence[Device], address: str, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, len(devices), timeout
        self._under_way: dict[int, list[Any]] = {}  # what waits for transfers, by their number
        self._to_copy: dict[int, list[tuple[Tensor, Tensor]]] = {}  # from the CPU's memory, when they have arrived
        self.place = place_of(devices[rank])
        gpus = [device for device in devices if device.kind == "cuda"]
        # two ranks on one GPU: NCCL refuses them, and what they exchange goes through the CPU's memory
        self._on_gpu = bool(gpus) and (len(set(gpus)) == len(gpus) or address != LOOPBACK)
        limit = timedelta(seconds=timeout)
        try:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = limit
            self._gloo: Any = dist.ProcessGroupGloo(store_under("gloo", store), rank, self.size, options)
            self._nccl: Any = None
            if self._on_gpu:
                if name := interface_of(address):
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
                fast = dist.ProcessGroupNCCL.Options()
                fast._timeout = limit
                self._nccl = dist.ProcessGroupNCCL(store_under("nccl", store), rank, self.size, fast)
        except RuntimeError as problem:
            raise PeersLost(f"The ranks cannot reach each other: {_first_line(problem)}.") from problem

    def close(self) -> None:
        """Ends the connections; whoever waits for this rank notices, at once.

        They end when nothing refers to them any more. So no function here keeps one, or what waits for one, in a
        variable: an exception would keep its frame, and the connection with it.
        """
        self._under_way.clear()
        self._to_copy.clear()
        for wire in (self._gloo, self._nccl):
            if wire is not None:
                with contextlib.suppress(RuntimeError):
                    wire.abort()
        self._gloo = self._nccl = None

    def begin(self, number: int, sends: Sequence[Move], receives: Sequence[Move]) -> None:
        """Starts to send vectors to ranks, and to write what ranks send into vectors; all ranks use the same `number`.

        Until it is finished, none of these vectors may be touched.
        """
        place = self.place if self._on_gpu else torch.device("cpu")
        sent = [(target, vector.to(place)) for target, vector in sends]
        written = [
            (source, vector if vector.device == place else torch.empty_like(vector, device=place))
            for source, vector in receives
        ]
        self._under_way[number] = self._start(self._on_gpu, sent, written, number)
        self._to_copy[number] = [
            (vector, arrived)
            for (_, vector), (_, arrived) in zip(receives, written, strict=True)
            if vector is not arrived
        ]

    def finish(self, number: int) -> None:
        """Waits until all that was begun with this number has arrived."""
        self._finish(self._under_way.pop(number))
        for vector, arrived in self._to_copy.pop(number):
            vector.copy_(arrived)

    def all_reduce(self, vector: Tensor) -> Tensor:
        """The sum over all ranks, in PyTorch's own order of additions."""
        total = vector.to(self.place if self._on_gpu else torch.device("cpu"), copy=True)
        works: list[Any] = []
        try:
            works.append(self._wire(self._on_gpu).allreduce([total]))
            self._wait(works, time.monotonic() + self.timeout)
        except RuntimeError as problem:
            works.clear()
            raise self._lost(problem) from problem
        return total.to(self.place)

    def gather(self, own: bytes, ranks: Sequence[int] | None = None) -> list[bytes]:
        """What each rank brings, in the order of `ranks`: all of them, or those that are known to come."""
        ranks = range(self.size) if ranks is None else ranks
        others = [rank for rank in ranks if rank != self.rank]
        message = np.frombuffer(len(own).to_bytes(8, "little") + own, np.uint8).copy()
        head = torch.zeros(HEAD, dtype=torch.uint8)
        head[: min(HEAD, len(message))] = torch.from_numpy(message[:HEAD])
        heads = {rank: torch.empty(HEAD, dtype=torch.uint8) for rank in others}
        self._move([(rank, head) for rank in others], list(heads.items()))
        lengths = {rank: int.from_bytes(first[:8].numpy().tobytes(), "little") + 8 for rank, first in heads.items()}
        rest = torch.from_numpy(message[HEAD:])
        rests = {
            rank: torch.empty(length - HEAD, dtype=torch.uint8) for rank, length in lengths.items() if length > HEAD
        }
        if len(rest) or rests:
            self._move([(rank, rest) for rank in others if len(rest)], list(rests.items()))
        found = {self.rank: own}
        for rank, first in heads.items():
            whole = torch.cat([first, rests[rank]]) if rank in rests else first
            found[rank] = whole[8 : lengths[rank]].numpy().tobytes()
        return [found[rank] for rank in ranks]

    def share(self, source: int, own: bytes) -> bytes:
        """On every rank the bytes of rank `source`."""
        return self.gather(own if self.rank == source else b"")[source]

    def _move(self, sends: Sequence[Move], receives: Sequence[Move]) -> None:
        """Everything at the same time, through the CPU's memory; over when all has arrived."""
        self._finish(self._start(False, sends, receives, MESSAGES))

    def _start(self, on_gpu: bool, sends: Sequence[Move], receives: Sequence[Move], tag: int) -> list[Any]:
        works: list[Any] = []
        if not sends and not receives:
            return works
        try:
            if on_gpu:
                self._wire(on_gpu)._start_coalescing(self.place)
            works += [self._wire(on_gpu).recv([tensor], source, tag) for source, tensor in receives]
            works += [self._wire(on_gpu).send([tensor], target, tag) for target, tensor in sends]
            if on_gpu:
                works[:] = [self._wire(on_gpu)._end_coalescing(self.place)]
        except RuntimeError as problem:
            works.clear()
            raise self._lost(problem) from problem
        return works

    def _finish(self, works: list[Any]) -> None:
        try:
            self._wait(works, time.monotonic() + self.timeout)
        except RuntimeError as problem:
            works.clear()
            raise self._lost(problem) from problem

    def _wire(self, on_gpu: bool) -> Any:
        found = self._nccl if on_gpu else self._gloo
        if found is None:
            raise PeersLost("The connections to the other ranks are closed.")
        return found

    def _wait(self, works: list[Any], deadline: float) -> None:
        while works:
            if self._on_gpu:  # waiting for NCCL would only make the stream wait
                while not works[0].is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError("Timed out waiting for NCCL")
                    time.sleep(0)
            works[0].wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            del works[0]

    def _lost(self, problem: RuntimeError) -> PeersLost:
        self.close()
        lost = PeersLost(_first_line(problem))
        lost.is_late = "timed out" in str(problem).lower()
        return lost


def tensor_to_plain(tensor: Tensor) -> dict[str, Any]:
    """A tensor of any kind as plain values and bytes."""
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"kind": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "bytes": octets}


def tensor_from_plain(plain: dict[str, Any], place: torch.device) -> Tensor:
    """The tensor again, on `place`."""
    flat = torch.from_numpy(plain["bytes"].copy()).view(getattr(torch, plain["kind"]))
    return flat.reshape(plain["shape"]).to(place)


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(".")
