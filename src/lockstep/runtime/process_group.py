"""A rank's connections to the other processes: tensors and bytes over Gloo and NCCL, with a deadline for each.

Only tensors are sent; what is not a tensor is packed into one (see `core/serialization.py`). Nothing is ever unpickled.
"""

import contextlib
import hmac
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.backends.torch import torch_device
from lockstep.core.device import Device
from lockstep.core.errors import BackendError, PeerFailure, first_line
from lockstep.runtime.store import LOOPBACK, Store, interface_of, prefix_store

HEAD = 4096  # bytes of a first message: its length, and as much as fits; as a rule, that is all
MESSAGES = 1 << 30  # the tag of what is no bucket of a vector
SHARED_GPU = "LOCKSTEP_NCCL_SHARED_GPU"  # set to 1 in tests: NCCL between ranks on one GPU, which it refuses otherwise
SPIN_SECONDS = 0.0005  # that a wait for NCCL takes all of a core
Transfer = tuple[int, Tensor]  # a rank, and what is sent to it, or where what it sends is written to


def check_can_fork(devices: Sequence[Device]) -> None:
    """Refuses to start workers for GPUs from a process that has used one already: CUDA does not survive a fork."""
    if devices[0].kind == "cuda" and torch.cuda.is_initialized():
        raise BackendError(
            "CUDA is already initialized in this process, so forked processes cannot use it. Use --engine "
            "inprocess, or start the program with torchrun."
        )


class ProcessGroup:
    """The ranks that work together. Any error closes it: the others then notice, and all of them can connect anew."""

    def __init__(
        self,
        store: Store,
        rank: int,
        devices: Sequence[Device],
        address: str,
        timeout: float,
        secret: bytes | None = None,  # that all ranks have, and nobody else
    ) -> None:
        self.rank, self.size, self.timeout = rank, len(devices), timeout
        self._pending: dict[int, list[Any]] = {}  # works under way, by their tag
        self._staged: dict[int, list[Transfer]] = {}  # received in the CPU's memory, to be copied to the GPU's
        self.device = torch_device(devices[rank])
        gpus = [device for device in devices if device.kind == "cuda"]
        # NCCL refuses two ranks on one GPU: what they exchange goes through the CPU's memory
        are_apart = len(set(gpus)) == len(gpus) or address != LOOPBACK
        self._uses_nccl = bool(gpus) and (are_apart or os.environ.get(SHARED_GPU) == "1")
        limit = timedelta(seconds=timeout)
        try:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = limit
            self._gloo: Any = dist.ProcessGroupGloo(prefix_store("gloo", store), rank, self.size, options)
            self._nccl: Any = None
            if self._uses_nccl:
                if name := interface_of(address):
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
                if not are_apart:  # it believes that they are on different machines
                    os.environ |= {"NCCL_HOSTID": f"process-{os.getpid()}", "NCCL_IB_DISABLE": "1"}
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = limit
                self._nccl = dist.ProcessGroupNCCL(prefix_store("nccl", store), rank, self.size, nccl)
        except RuntimeError as problem:
            failure = PeerFailure(f"The ranks cannot reach each other: {first_line(problem)}.")
            failure.timed_out = "time" in str(problem).lower()  # a time-out, or timed out
            raise failure from problem
        if secret is not None:
            self._authenticate(secret)

    def _authenticate(self, secret: bytes) -> None:
        """Every rank proves to every other that it has the secret: whoever was connected first may be a stranger."""
        own = os.urandom(32)
        nonces = self._exchanged(dict.fromkeys(self._others, own))
        proofs = self._exchanged({rank: _proof(secret, self.rank, rank, nonces[rank]) for rank in self._others})
        for rank in self._others:
            if not hmac.compare_digest(proofs[rank], _proof(secret, rank, self.rank, own)):
                self.close()
                raise PeerFailure(
                    f"What is connected in the place of rank {rank} does not belong to this run. On several machines, "
                    f"all need the same secret: a file that LOCKSTEP_SECRET_FILE names, with mode 600"
                )

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _exchanged(self, own: dict[int, bytes]) -> dict[int, bytes]:
        """32 bytes for each of the other ranks, and what each has sent."""
        sends = [(rank, torch.frombuffer(bytearray(content), dtype=torch.uint8)) for rank, content in own.items()]
        found = {rank: torch.empty(32, dtype=torch.uint8) for rank in own}
        self._send_and_receive(sends, list(found.items()))
        return {rank: tensor.numpy().tobytes() for rank, tensor in found.items()}

    def close(self) -> None:
        """Closes the connections; whoever waits for this rank notices, at once.

        They are closed when nothing refers to them any more. So no function here keeps one, or a work of one, in a
        variable: an exception would keep its frame, and the connection with it.
        """
        self._pending.clear()
        self._staged.clear()
        for connections in (self._gloo, self._nccl):
            if connections is not None:
                with contextlib.suppress(RuntimeError):
                    connections.abort()
        self._gloo = self._nccl = None

    def start(self, tag: int, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Starts to send vectors to ranks, and to write what ranks send into vectors; all ranks use the same `tag`.

        Until it is finished, none of these vectors may be touched.
        """
        device = self.device if self._uses_nccl else torch.device("cpu")
        sent = [(target, vector.to(device)) for target, vector in sends]
        written = [
            (source, vector if vector.device == device else torch.empty_like(vector, device=device))
            for source, vector in receives
        ]
        self._pending[tag] = self._start(self._uses_nccl, sent, written, tag)
        self._staged[tag] = written

    def finish(self, tag: int, receives: Sequence[Transfer]) -> None:
        """Waits until all that was started with this tag has arrived."""
        self._finish(self._pending.pop(tag), self._uses_nccl)
        for (_, vector), (_, arrived) in zip(receives, self._staged.pop(tag), strict=True):
            if vector is not arrived:
                vector.copy_(arrived)

    def all_reduce(self, vector: Tensor) -> Tensor:
        """The sum over all ranks, in PyTorch's own order of additions."""
        total = vector.to(self.device if self._uses_nccl else torch.device("cpu"), copy=True)
        works: list[Any] = []
        try:
            works.append(self._backend(self._uses_nccl).allreduce([total]))
            self._wait(works, self._uses_nccl)
        except RuntimeError as problem:
            works.clear()
            raise self._failed(problem) from problem
        return total.to(self.device)

    def all_gather(self, own: bytes, ranks: Sequence[int] | None = None) -> list[bytes]:
        """The bytes of each rank, in the order of `ranks`: all of them, or those that are known to take part."""
        ranks = range(self.size) if ranks is None else ranks
        others = [rank for rank in ranks if rank != self.rank]
        message = np.frombuffer(len(own).to_bytes(8, "little") + own, np.uint8).copy()
        head = torch.zeros(HEAD, dtype=torch.uint8)
        head[: min(HEAD, len(message))] = torch.from_numpy(message[:HEAD])
        heads = {rank: torch.empty(HEAD, dtype=torch.uint8) for rank in others}
        self._send_and_receive([(rank, head) for rank in others], list(heads.items()))
        lengths = {rank: int.from_bytes(first[:8].numpy().tobytes(), "little") + 8 for rank, first in heads.items()}
        rest = torch.from_numpy(message[HEAD:])
        rests = {
            rank: torch.empty(length - HEAD, dtype=torch.uint8) for rank, length in lengths.items() if length > HEAD
        }
        if len(rest) or rests:
            self._send_and_receive([(rank, rest) for rank in others if len(rest)], list(rests.items()))
        found = {self.rank: own}
        for rank, first in heads.items():
            whole = torch.cat([first, rests[rank]]) if rank in rests else first
            found[rank] = whole[8 : lengths[rank]].numpy().tobytes()
        return [found[rank] for rank in ranks]

    def broadcast(self, source: int, own: bytes) -> bytes:
        """On every rank the bytes of rank `source`."""
        return self.all_gather(own if self.rank == source else b"")[source]

    def _send_and_receive(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        """Everything at the same time, over Gloo; over when all has arrived."""
        self._finish(self._start(False, sends, receives, MESSAGES), False)

    def _start(self, nccl: bool, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int) -> list[Any]:
        works: list[Any] = []
        if not sends and not receives:
            return works
        try:
            if nccl:
                self._backend(nccl)._start_coalescing()
            works += [self._backend(nccl).recv([tensor], source, tag) for source, tensor in receives]
            works += [self._backend(nccl).send([tensor], target, tag) for target, tensor in sends]
            if nccl:
                works[:] = [self._backend(nccl)._end_coalescing()]
        except RuntimeError as problem:
            works.clear()
            raise self._failed(problem) from problem
        return works

    def _finish(self, works: list[Any], nccl: bool) -> None:
        try:
            self._wait(works, nccl)
        except RuntimeError as problem:
            works.clear()
            raise self._failed(problem) from problem

    def _backend(self, nccl: bool) -> Any:
        found = self._nccl if nccl else self._gloo
        if found is None:
            raise PeerFailure("The connections to the other ranks are closed.")
        return found

    def _wait(self, works: list[Any], nccl: bool) -> None:
        deadline = time.monotonic() + self.timeout
        while works:
            if nccl:  # to wait for NCCL would only make the stream wait; Gloo's works never complete by themselves
                began = time.monotonic()
                while not works[0].is_completed():
                    now = time.monotonic()
                    if now > deadline:
                        raise RuntimeError("Timed out waiting for NCCL")
                    time.sleep(0.0 if now < began + SPIN_SECONDS else SPIN_SECONDS / 5)
            works[0].wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            del works[0]

    def _failed(self, problem: RuntimeError) -> PeerFailure:
        self.close()
        failure = PeerFailure(first_line(problem))
        failure.timed_out = "timed out" in str(problem).lower()
        return failure


def _proof(secret: bytes, source: int, target: int, nonce: bytes) -> bytes:
    """That `source` has the secret, for `target`, which has chosen the nonce."""
    return hmac.digest(secret, f"lockstep rank {source} to {target} ".encode() + nonce, "sha256")
