"""Our exchanges, as a step runs them, and torch.distributed.all_reduce, in the same processes."""

import time
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from lockstep.backends import load_backend
from lockstep.bench.contenders import ContenderRank
from lockstep.bench.contenders.distributed import TIMEOUT_SECONDS, barrier, init_process_group
from lockstep.bench.workload import Workload
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
    """A rank that exchanges a random vector, as if it were the gradient of its only shard."""

    def __init__(self, workload: Workload, rank: ContenderRank) -> None:
        self._device = init_process_group(rank)
        store = prefix_store(f"{rank.store_prefix}/ours", join_store(LOOPBACK, rank.store_port, TIMEOUT_SECONDS))
        self._rank, self._devices = rank.rank, [Device(name) for name in workload.devices]
        group = ProcessGroup(store, rank.rank, self._devices, LOOPBACK, TIMEOUT_SECONDS)
        self._engine = Processes(load_backend("torch"), self._devices, group)
        self._engine.__enter__()
        self._interpreter = lru_cache(maxsize=4)(self._new_interpreter)  # as in a run: its memory is allocated once

    def prepare(self) -> dict[str, Any]:
        """Nothing takes long."""
        return {}

    def warm_up(self, num_steps: int, exchange: str, num_bytes: int) -> dict[str, Any]:
        """Checks the sum too."""
        for _ in range(num_steps):
            (_, total), (_, expected) = self._exchange(exchange, num_bytes), self._exchange(ALL_REDUCE, num_bytes)
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
        return {"chosen": ""}

    def run(self, num_steps: int, exchange: str, num_bytes: int) -> dict[str, Any]:
        return {"seconds": sum(self._exchange(exchange, num_bytes)[0] for _ in range(num_steps))}

    def _exchange(self, exchange: str, num_bytes: int) -> tuple[float, Any]:
        """The seconds it takes, and the sum."""
        generator = torch.Generator().manual_seed(self._rank)
        vector = torch.rand(num_bytes // 4, generator=generator).to(self._device)
        interpreter = None if exchange == ALL_REDUCE else self._interpreter(exchange, len(vector))
        barrier(self._device)
        began = time.perf_counter()
        if interpreter is None:
            dist.all_reduce(vector)
            total = vector
        else:  # as after the backward pass: all buckets are ready
            interpreter.state.sums.put(Partial(Node(self._rank, 1), range(len(vector))), vector)
            for instruction in interpreter.program.exchange:
                if not isinstance(instruction, WaitForBackward):
                    interpreter.execute(instruction)
            interpreter.hold_total()
            total = interpreter.state.total
        barrier(self._device)
        return time.perf_counter() - began, total

    def _new_interpreter(self, exchange: str, size: int) -> Interpreter:
        num_ranks, entries = len(self._devices), range(size)
        shards = tuple(split_over_ranks(num_ranks, num_ranks))
        split = DataParallel(shards, entries, bucket_ranges(entries, BUCKET_MB, num_ranks), exchange)
        return self._engine.interpreter(data_parallel(split))

    def close(self) -> None:
        barrier(self._device)
        self._engine.close()
        dist.destroy_process_group()
