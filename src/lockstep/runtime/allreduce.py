"""`lockstep.allreduce`: the exchange of a step, on tensors of the user's own, run by one thread for all ranks.

Where the framework writes in place, nothing is allocated: every value of an exchange has one reader, so a sum is written
over its left part, and the total into each of the user's tensors.
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
    totals = run_exchange(backend, devices, vectors, exchange_schedule(exchange, len(data), len(vectors[0])))
    for rank, (entry, view) in enumerate(zip(data, views, strict=True)):
        if view is None:
            data[rank] = backend.assign(entry, totals[rank].reshape(entry.shape))
    return data


def run_exchange(backend: Backend, devices: list[Device], vectors: list[Tensor], schedule: Schedule) -> list[Tensor]:
    """The total on every rank; in the memory of `vectors`, where the framework writes in place."""
    exchanges = Exchanges(backend, devices, devices, busy=[])
    interpreters = []
    for rank, (device, vector) in enumerate(zip(devices, vectors, strict=True)):
        interpreter = Interpreter(Rank(rank, device, backend, Position()), schedule, exchanges.transport(rank))
        interpreter.hold(Partial(Node(rank, 1), schedule.entries), vector)
        interpreter.workspace.use_as_total(vector)
        interpreters.append(interpreter)
    for rank, instruction in exchange_order(schedule):
        interpreters[rank].execute(instruction)
    for interpreter in interpreters:
        interpreter.hold_total()
    return [interpreter.total for interpreter in interpreters]
