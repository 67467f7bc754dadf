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
from torch import Tensor

from lockstep.backends.torch import torch_device
from lockstep.core.device import Device
from lockstep.core.errors import PeerFailure, first_line
from lockstep.core.secret import proof_of
from lockstep.runtime.communicators import (
    GLOO,
    Communicator,
    communicators_of,
    connect_gloo,
    connect_nccl,
    prepare_nccl,
    uses_nccl,
)
from lockstep.runtime.rank_errors import is_timeout
from lockstep.runtime.store import Store
from lockstep.runtime.transport import GroupKey
from lockstep.schedules.instructions import GRADIENTS, Schedule, communicator_of

HEAD = 4096  # bytes of a first message: its length, and as much as fits; as a rule, that is all
MAX_MESSAGE = 1 << 36  # bytes
MAX_PLAIN = 1 << 26  # bytes that describe an activation
MESSAGES = 1 << 30  # the tag of what belongs to no channel
SPIN_SECONDS = 0.0005  # that a wait for NCCL takes all of a core
Transfer = tuple[int, Tensor]  # a rank, and what is sent to it, or where what it sends is written to


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
        *,
        proof_seconds: float | None = None,  # for all of them to prove it; None: the time-out
    ) -> None:
        self.rank, self.size, self.timeout = rank, len(devices), timeout
        self._store = store  # Gloo calls it, and does not keep an object of Python's alive
        self._pending: dict[GroupKey, list[Any]] = {}  # works under way
        self._messages: dict[GroupKey, list[tuple[list[Any], bool]]] = {}  # the same, over Gloo or NCCL, of messages
        self._staged: dict[GroupKey, list[Transfer]] = {}  # received in the CPU's memory, to be copied to the GPU's
        self.device = torch_device(devices[rank])
        self._uses_nccl = uses_nccl(devices, address)
        self._connections: dict[Communicator, Any] = {}  # NCCL's communicators do not wait for each other
        try:
            self._connections[GLOO] = connect_gloo(store, rank, self.size, address, timeout)
            if self._uses_nccl:
                prepare_nccl(devices, address)
        except RuntimeError as problem:
            failure = PeerFailure(f"The ranks cannot reach each other: {first_line(problem)}.")
            failure.timed_out = is_timeout(problem)
            raise failure from problem
        if secret is not None:
            self.timeout = min(timeout, proof_seconds or timeout)  # a stranger may say nothing at all
            self._authenticate(secret)
            self.timeout = timeout

    def _authenticate(self, secret: bytes) -> None:
        """Every rank proves to every other that it has the secret: whoever was connected first may be a stranger."""
        own = os.urandom(32)
        nonces = self._exchanged(dict.fromkeys(self._others, own))
        proofs = self._exchanged({rank: proof_of(secret, self.rank, rank, nonces[rank]) for rank in self._others})
        for rank in self._others:
            if not hmac.compare_digest(proofs[rank], proof_of(secret, rank, self.rank, own)):
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
        for sent in self._messages.values():
            sent.clear()
        self._messages.clear()
        self._staged.clear()
        connections, self._connections = self._connections, {}
        while connections:  # Gloo's first: the others wait there
            with contextlib.suppress(RuntimeError):
                connections.pop(next(iter(connections))).abort()

    def connect(self, schedule: Schedule) -> None:
        """Connects what the transfers of a schedule queue up in. A collective; nothing, where it was done before."""
        for comm in communicators_of(schedule) if self._uses_nccl else ():
            if self.rank in comm.ranks and comm not in self._connections:
                number, token = comm.number_of(self.rank), torch.zeros(1, device=self.device)
                before, after = comm.ranks[number - 1], comm.ranks[(number + 1) % len(comm.ranks)]
                self._finish(self._start(comm, [(after, token)], [(before, torch.zeros_like(token))], 0), True)

    def start(
        self,
        key: GroupKey,
        sends: Sequence[Transfer],
        receives: Sequence[Transfer],
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Starts to send vectors to ranks, and to write what ranks send into vectors; all ranks use the same `key`.

        Until it is finished, none of these vectors may be touched. `ranks` are those that exchange such vectors with
        each other: all, or those that hold the same part of the model.
        """
        sent = [(target, vector.to(self._device_of_transfers)) for target, vector in sends]
        written = [(source, self._memory_for(vector)) for source, vector in receives]
        self._pending[key] = self._start(self._communicator_of(key, ranks), sent, written, key.tag)
        self._staged[key] = written

    def finish(self, key: GroupKey, receives: Sequence[Transfer]) -> None:
        """Waits until all that was started with this key has arrived."""
        self._finish(self._pending.pop(key), self._uses_nccl)
        for (_, vector), (_, arrived) in zip(receives, self._staged.pop(key), strict=True):
            if vector is not arrived:
                vector.copy_(arrived)

    def start_message(self, key: GroupKey, target: int, plain: bytes, tensors: Sequence[Tensor]) -> None:
        """Starts to send bytes, and then tensors whose shapes they tell; they may be touched after `finish_message`."""
        content = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        head, sent = [(target, torch.tensor([len(content)])), (target, content)], self._messages.setdefault(key, [])
        sent.append((self._start(GLOO, head, [], key.tag), False))
        for tensor in tensors:
            if len(tensor):
                there = [(target, tensor.to(self._device_of_transfers))]
                comm = self._communicator_of(key, (self.rank, target))
                sent.append((self._start(comm, there, [], key.tag), self._uses_nccl))

    def receive_bytes(self, key: GroupKey, source: int) -> bytes:
        """The bytes of a message; waits for them."""
        length = torch.zeros(1, dtype=torch.int64)
        self._finish(self._start(GLOO, [], [(source, length)], key.tag), False)
        if not 0 < int(length) <= MAX_PLAIN:
            self.close()
            raise PeerFailure(f"Rank {source} sent a message of {int(length)} bytes, which cannot be.")
        content = torch.empty(int(length), dtype=torch.uint8)
        self._finish(self._start(GLOO, [], [(source, content)], key.tag), False)
        return content.numpy().tobytes()

    def receive_tensors(self, key: GroupKey, source: int, tensors: Sequence[Tensor]) -> None:
        """The tensors of a message, into this memory."""
        for tensor in tensors:
            if len(tensor):
                written = self._memory_for(tensor)
                comm = self._communicator_of(key, (self.rank, source))
                self._finish(self._start(comm, [], [(source, written)], key.tag), self._uses_nccl)
                if written is not tensor:
                    tensor.copy_(written)

    def finish_message(self, key: GroupKey) -> None:
        """Waits until what was sent with this key has arrived."""
        while self._messages.get(key):
            self._finish(*self._messages[key].pop(0))
        self._messages.pop(key, None)

    @property
    def _device_of_transfers(self) -> torch.device:
        return self.device if self._uses_nccl else torch.device("cpu")

    def _memory_for(self, vector: Tensor) -> Tensor:
        """Where to write what `vector` will be."""
        there = self._device_of_transfers
        return vector if vector.device == there else torch.empty_like(vector, device=there)

    def _communicator_of(self, key: GroupKey, ranks: Sequence[int] | None = None) -> Communicator:
        """What the transfers of a group between these ranks queue up in."""
        if not self._uses_nccl:
            return GLOO
        own = range(self.size) if ranks is None else ranks
        return Communicator(communicator_of(key.channel, key.round), tuple(sorted(own)))

    def all_reduce(self, vector: Tensor) -> Tensor:
        """The sum over all ranks, in PyTorch's own order of additions."""
        total = vector.to(self.device if self._uses_nccl else torch.device("cpu"), copy=True)
        works: list[Any] = []
        try:
            works.append(self.backend(self._communicator_of(GroupKey(GRADIENTS, 0, 0))).allreduce([total]))
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
        for rank, length in lengths.items():
            if length > MAX_MESSAGE:
                raise self._failed(RuntimeError(f"Rank {rank} announces a message of {length:,} bytes."))
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
        self._finish(self._start(GLOO, sends, receives, MESSAGES), False)

    def _start(
        self, comm: Communicator, sends: Sequence[Transfer], receives: Sequence[Transfer], tag: int
    ) -> list[Any]:
        works: list[Any] = []
        if not sends and not receives:
            return works
        try:
            if comm != GLOO:
                self.backend(comm)._start_coalescing()
            works += [self.backend(comm).recv([tensor], comm.number_of(source), tag) for source, tensor in receives]
            works += [self.backend(comm).send([tensor], comm.number_of(target), tag) for target, tensor in sends]
            if comm != GLOO:
                works[:] = [self.backend(comm)._end_coalescing()]
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

    def backend(self, comm: Communicator) -> Any:
        """PyTorch's connections of a communicator, made when it is first used."""
        if not self._connections:
            raise PeerFailure("The connections to the other ranks are closed.")
        if comm not in self._connections:
            self._connections[comm] = connect_nccl(self._store, self.rank, comm, self.timeout)
        return self._connections[comm]

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
        failure.timed_out = is_timeout(problem)
        return failure
