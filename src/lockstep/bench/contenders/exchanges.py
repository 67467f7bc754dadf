"""The exchanges as our own step does them, and torch.distributed.all_reduce, in the same two processes."""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.backends import load_backend
from lockstep.bench.contenders import Place
from lockstep.bench.contenders.peer import MEETING_SECONDS, join, meet
from lockstep.bench.work import Work
from lockstep.core.device import Device
from lockstep.runtime.process_group import LOOPBACK, Group, join_store, store_under
from lockstep.runtime.processes import Processes
from lockstep.runtime.process_transport import Wire
from lockstep.schedules.reduction_tree import maximal_nodes

ALL_REDUCE = "all_reduce"


class Exchanges:
    """A rank that holds the sum of its own shards' gradients, made up, and exchanges it again and again."""

    def __init__(self, work: Work, place: Place) -> None:
        self._where = join(work, place)
        store = store_under(f"{place.name}/ours", join_store(LOOPBACK, place.port, MEETING_SECONDS))
        devices = [Device(name) for name in work.devices]
        group = Group(store, place.rank, devices, LOOPBACK, MEETING_SECONDS)
        self._engine = Processes(load_backend("torch"), devices, group)
        self._engine.__enter__()
        self._ranges = self._engine.balance.ranges(work.num_shards, len(devices))
        self._nodes = maximal_nodes(self._ranges[place.rank], work.num_shards)
        self._rank = place.rank
        self._wires: dict[tuple[str, int], Wire] = {}

    def warm_up(self, method: str, num_bytes: int) -> dict[str, Any]:
        """Exchanges once, and looks if the sum is right."""
        found, wanted = self._exchanged(method, num_bytes), self._exchanged(ALL_REDUCE, num_bytes)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        return {"chosen": ""}

    def run(self, method: str, num_bytes: int, num_steps: int) -> dict[str, Any]:
        seconds = 0.0
        for _ in range(num_steps):
            seconds += self._timed(method, num_bytes)[0]
        return {"seconds": seconds}

    def _exchanged(self, method: str, num_bytes: int) -> torch.Tensor:
        return self._timed(method, num_bytes)[1]

    def _timed(self, method: str, num_bytes: int) -> tuple[float, torch.Tensor]:
        made = torch.Generator().manual_seed(self._rank)
        vector = torch.rand(num_bytes // 4, generator=made).to(self._where)
        self._engine.exchange_name = method
        meet(self._where)
        began = time.perf_counter()
        if method == ALL_REDUCE:
            dist.all_reduce(vector)
        else:
            vector = self._summed(vector)
        meet(self._where)
        return time.perf_counter() - began, vector

    def _summed(self, vector: torch.Tensor) -> torch.Tensor:
        """As after backward: all parts leave at once."""
        key = self._engine.exchange_name, len(vector)
        if key not in self._wires:
            self._wires = {known: wire for known, wire in self._wires.items() if known[1] == len(vector)}
            self._wires[key] = self._engine.wire(self._ranges, len(vector))
        wire = self._wires[key]  # a run has one, and its memory is there from the step before
        way_out = wire.start()
        for number, place in enumerate(way_out.places):
            way_out.leave(number, partial(dict.fromkeys, self._nodes, vector[place.start : place.stop]))
        return wire.travel()

    def close(self) -> None:
        meet(self._where)
        self._engine.close()
        dist.destroy_process_group()
