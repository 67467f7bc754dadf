"""`lockstep.allreduce`: the exchange of a step, on tensors of the user's own, run by one thread for all ranks.

Where the framework writes in place, nothing is allocated: every value of an exchange has one reader, so a sum is
written over its left part, and the total into each of the user's tensors; block by block, so that what one rank has
written is still in the cache when the others copy it.
"""

from collections.abc import Sequence
from functools import lru_cache
from threading import get_ident

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.runtime.engine import Position, Rank
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.thread_transport import ThreadGroup
from lockstep.schedules.instructions import Add, Communicate, Partial, Wait
from lockstep.schedules.proof import one_thread_order
from lockstep.schedules.reduction_tree import Node

BLOCK = 1 << 21  # entries: the fastest of 2**19 to 2**22 on 2 cores with 32 MiB of cache, for 2, 4 and 8 x 40 MB


def allreduce_in_place(backend: Backend, data: list[Tensor], exchange: str) -> list[Tensor]:
    """Makes every entry of `data` the sum of them all, in the tree's order."""
    devices = [backend.device_of(entry) for entry in data]
    views = [backend.flat_view(entry) for entry in data]
    vectors = [
        backend.copy_to(entry, device).reshape(-1) if view is None else view
        for entry, view, device in zip(data, views, devices, strict=True)
    ]
    size = len(vectors[0])
    if size == 0:
        return data
    block = BLOCK if backend.capabilities.writes_in_place else size
    for start in range(0, size, block):
        stop = min(start + block, size)
        exchange_all = one_thread(get_ident(), backend, tuple(devices), exchange, stop - start)
        totals = exchange_all.run([backend.chunk(vector, start, stop) for vector in vectors])
    for rank, (entry, view) in enumerate(zip(data, views, strict=True)):
        if view is None:
            total = vectors[rank] if backend.capabilities.writes_in_place else totals[rank]
            data[rank] = backend.assign(entry, total.reshape(entry.shape))
    return data


class OneThread:
    """All ranks of an exchange, run by the calling thread, for vectors of one size."""

    def __init__(self, backend: Backend, devices: Sequence[Device], exchange: str, num_entries: int) -> None:
        # a step in which rank r has shard r; of it, only the exchange is run
        entries, shards = range(num_entries), tuple(range(rank, rank + 1) for rank in range(len(devices)))
        schedule = data_parallel(DataParallel(shards, entries, (entries,), exchange))
        group = ThreadGroup(backend, devices, devices)
        self._interpreters = [
            Interpreter(Rank(rank, device, backend, Position()), schedule, group.transport(rank))
            for rank, device in enumerate(devices)
        ]
        self._leaves = [Partial(Node(rank, 1), entries) for rank in range(len(devices))]
        self._order = [
            (self._interpreters[rank].execute, instruction)
            for rank, instruction in one_thread_order(schedule)
            if isinstance(instruction, (Add, Communicate, Wait))
        ]

    def run(self, vectors: list[Tensor]) -> list[Tensor]:
        """The total on every rank; in the memory of `vectors`, where the framework writes in place."""
        try:
            for interpreter, leaf, vector in zip(self._interpreters, self._leaves, vectors, strict=True):
                interpreter.state.sums.put(leaf, vector)
                interpreter.workspace.use_as_total(vector)
            for execute, instruction in self._order:
                execute(instruction)
            return [interpreter.release_total() for interpreter in self._interpreters]
        except BaseException:
            one_thread.cache_clear()  # this one has stopped halfway
            raise


@lru_cache(maxsize=16)
def one_thread(
    thread: int, backend: Backend, devices: tuple[Device, ...], exchange: str, num_entries: int
) -> OneThread:
    """Kept for the next tensors of that size, for each thread that calls `lockstep.allreduce`: they are made slowly."""
    return OneThread(backend, devices, exchange, num_entries)
