"""The exchanges as our own step does them, and torch.distributed.all_reduce, in the same two processes."""

import time
from typing import Any

import torch
import torch.distributed as dist

from lockstep.backends import load_backend
from lockstep.bench.contenders import Place
from lockstep.bench.contenders.peer import MEETING_SECONDS, join, meet
from lockstep.bench.work import Work
from lockstep.core.device import Device
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.buckets import BUCKET_MB, bucket_ranges
from lockstep.partition.ranks import split_over_ranks
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.processes import Processes
from lockstep.runtime.store import LOOPBACK, join_store, prefix_store
from lockstep.schedules.instructions import Partial, WaitForBackward
from lockstep.schedules.reduction_tree import Node

ALL_REDUCE = "all_reduce"


class Exchanges:
    """A rank that holds the gradient of one shard, made up, and exchanges it again and again."""

    def __init__(self, work: Work, place: Place) -> None:
        self._where = join(work, place)
        store = prefix_store(f"{place.name}/ours", join_store(LOOPBACK, place.port, MEETING_SECONDS))
        self._devices = [Device(name) for name in work.devices]
        group = ProcessGroup(store, place.rank, self._devices, LOOPBACK, MEETING_SECONDS)
        self._engine = Processes(load_backend("torch"), self._devices, group)
        self._engine.__enter__()
        self._rank = place.rank
        self._interpreters: dict[tuple[str, int], Interpreter] = {}

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
        interpreter = None if method == ALL_REDUCE else self._interpreter(method, len(vector))
        meet(self._where)
        began = time.perf_counter()
        if interpreter is None:
            dist.all_reduce(vector)
        else:
            vector = self._sum(interpreter, vector)
        meet(self._where)
        return time.perf_counter() - began, vector

    def _interpreter(self, method: str, size: int) -> Interpreter:
        """A run has one, and its memory is there from the step before."""
        key = method, size
        if key not in self._interpreters:
            self._interpreters = {known: one for known, one in self._interpreters.items() if known[1] == size}
            num_ranks, entries = len(self._devices), range(size)
            shards = tuple(split_over_ranks(num_ranks, num_ranks))
            split = DataParallel(shards, entries, bucket_ranges(entries, BUCKET_MB, num_ranks), method)
            self._interpreters[key] = self._engine.interpreter(data_parallel(split))
        return self._interpreters[key]

    def _sum(self, interpreter: Interpreter, vector: torch.Tensor) -> Any:
        """As after backward: all buckets are there at once."""
        interpreter.hold(Partial(Node(self._rank, 1), range(len(vector))), vector)
        for instruction in interpreter.program.exchange:
            if not isinstance(instruction, WaitForBackward):
                interpreter.execute(instruction)
        interpreter.hold_total()
        return interpreter.total

    def close(self) -> None:
        meet(self._where)
        self._engine.close()
        dist.destroy_process_group()
