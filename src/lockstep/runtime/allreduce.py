"""`lockstep.allreduce`: the exchange of a step, on tensors of the user's own, run by one thread for all ranks.

Where the framework writes in place, the sums are written into the user's tensors block by block: a block fits into the
cache, so what one rank has written, the others still find there.
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

BLOCK = 1 << 18  # entries


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
    views = [view for entry in data if (view := backend.flat_view(entry)) is not None]
    if len(views) < len(data):
        flat = [backend.copy_to(entry, device).reshape(-1) for entry, device in zip(data, devices, strict=True)]
        totals = OneThread(backend, devices, exchange, len(flat[0])).run(flat)
        for rank, total in enumerate(totals):
            data[rank] = backend.assign(data[rank], total.reshape(data[rank].shape))
        return data
    size = len(views[0])
    for whole, last in ((True, size // BLOCK * BLOCK), (False, size)):
        start = 0 if whole else size // BLOCK * BLOCK
        length = BLOCK if whole else size - start
        if start < last:
            runner = OneThread(backend, devices, exchange, length)
            for first in range(start, last, length):
                runner.run([backend.chunk(view, first, first + length) for view in views])
    return data


class OneThread:
    """All ranks of an exchange, run by the calling thread, for vectors of one size."""

    def __init__(self, backend: Backend, devices: list[Device], exchange: str, num_entries: int) -> None:
        self._schedule = exchange_schedule(exchange, len(devices), num_entries)
        self._order = exchange_order(self._schedule)
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
        for rank, instruction in self._order:
            self._interpreters[rank].execute(instruction)
        for interpreter in self._interpreters:
            interpreter.hold_total()
        return [interpreter.total for interpreter in self._interpreters]
