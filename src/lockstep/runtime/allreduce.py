"""`lockstep.allreduce`: the exchange of a step, on tensors of the user's own, run by one thread for all ranks.

Where the framework writes in place, nothing is allocated: every value of an exchange has one reader, so a sum is
written over its left part, and the total into each of the user's tensors; block by block, so that what one rank has
written is still in the cache when the others copy it.
"""

from functools import cache

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.runtime.engine import Position, Rank
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.thread_transport import Exchanges
from lockstep.schedules.instructions import Add, Communicate, Instruction, Partial, Schedule, Wait
from lockstep.schedules.proof import one_thread_order
from lockstep.schedules.reduction_tree import Node

BLOCK = 1 << 21  # entries: the fastest of 2**19 to 2**22 on 2 cores with 32 MiB of cache, for 2, 4 and 8 x 40 MB


@cache
def exchange_schedule(name: str, num_ranks: int, num_entries: int) -> Schedule:
    """A step in which rank r has shard r; of it, only the exchange will be run."""
    entries, shards = range(num_entries), tuple(range(rank, rank + 1) for rank in range(num_ranks))
    return data_parallel(DataParallel(shards, entries, (entries,), name))


@cache
def exchange_order(schedule: Schedule) -> list[tuple[int, Instruction]]:
    """(rank, instruction) of the exchange, in an order for one thread."""
    return [entry for entry in one_thread_order(schedule) if isinstance(entry[1], (Add, Communicate, Wait))]


def allreduce_in_place(backend: Backend, data: list[Tensor], exchange: str) -> list[Tensor]:
    """Makes every entry of `data` the sum of them all, in the tree's order."""
    devices = [backend.device_of(entry) for entry in data]
    views = [backend.flat_view(entry) for entry in data]
    vectors = [
        backend.copy_to(entry, device).reshape(-1) if view is None else view
        for entry, view, device in zip(data, views, devices, strict=True)
    ]
    size = len(vectors[0])
    block = BLOCK if backend.capabilities.writes_in_place else max(size, 1)
    runner: OneThread | None = None
    for start in range(0, size, block):
        stop = min(start + block, size)
        if runner is None or stop - start < block:
            runner = OneThread(backend, devices, exchange, stop - start)
        totals = runner.run([backend.chunk(vector, start, stop) for vector in vectors])
    for rank, (entry, view) in enumerate(zip(data, views, strict=True)):
        if view is None:
            total = vectors[rank] if backend.capabilities.writes_in_place else totals[rank]
            data[rank] = backend.assign(entry, total.reshape(entry.shape))
    return data


class OneThread:
    """All ranks of an exchange, run by the calling thread, for vectors of one size."""

    def __init__(self, backend: Backend, devices: list[Device], exchange: str, num_entries: int) -> None:
        self._schedule = exchange_schedule(exchange, len(devices), num_entries)
        exchanges = Exchanges(backend, devices, devices, busy=[])
        self._interpreters = [
            Interpreter(Rank(rank, device, backend, Position()), self._schedule, exchanges.transport(rank))
            for rank, device in enumerate(devices)
        ]

    def run(self, vectors: list[Tensor]) -> list[Tensor]:
        """The total on every rank; in the memory of `vectors`, where the framework writes in place."""
        for rank, (interpreter, vector) in enumerate(zip(self._interpreters, vectors, strict=True)):
            interpreter.hold(Partial(Node(rank, 1), self._schedule.entries), vector)
            interpreter.workspace.use_as_total(vector)
        for rank, instruction in exchange_order(self._schedule):
            self._interpreters[rank].execute(instruction)
        for interpreter in self._interpreters:
            interpreter.hold_total()
        return [interpreter.total for interpreter in self._interpreters]
