"""The interpreter over the transport of processes, with a process group that hands tensors over within one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.backends import load_backend
from lockstep.core.device import Device
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.buckets import bucket_ranges
from lockstep.partition.ranks import split_over_ranks
from lockstep.runtime.engine import Position, Rank
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.process_transport import ProcessTransport
from lockstep.schedules.exchanges import EXCHANGES, KEEPS_THE_TREE
from lockstep.schedules.instructions import Partial, WaitForBackward
from lockstep.schedules.reduction_tree import Node, sum_of

NUM_SHARDS = 8


class Hub:
    """Messages that wait for their receivers."""

    def __init__(self):
        self._changed, self._messages = threading.Condition(), {}

    def put(self, key, tensor):
        with self._changed:
            self._messages.setdefault(key, []).append(tensor.clone())
            self._changed.notify_all()

    def get(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: self._messages.get(key), timeout=30), key
            return self._messages[key].pop(0)


class LocalGroup:
    """A rank's side of a hub, with the methods of a process group."""

    device = torch.device("cpu")

    def __init__(self, hub, rank):
        self._hub, self.rank = hub, rank

    def start(self, tag, sends, receives, ranks):
        for target, tensor in sends:
            self._hub.put((self.rank, target, tag), tensor)

    def finish(self, tag, receives):
        for source, tensor in receives:
            tensor.copy_(self._hub.get((source, self.rank, tag)))


@pytest.mark.parametrize("size", [1, 5, 64, 257])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_rank_has_the_total_twice_in_a_row(exchange, num_ranks, size):
    ranges, hub, entries = tuple(split_over_ranks(NUM_SHARDS, num_ranks)), Hub(), range(size)
    buckets = bucket_ranges(entries, bucket_mb=240e-6, num_ranks=2)  # some smaller than there are ranks
    schedule = data_parallel(DataParallel(ranges, entries, buckets, exchange, max_addends=3))
    interpreters = [
        Interpreter(
            Rank(rank, Device(f"cpu:{rank}"), load_backend("torch"), Position()),
            schedule,
            ProcessTransport(LocalGroup(hub, rank), Position()),
            lambda brackets, tensors: eval(brackets, {f"x{n}": tensor for n, tensor in enumerate(tensors)}),
        )
        for rank in range(num_ranks)
    ]
    for seed in range(2):
        random = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(size, generator=random) for _ in range(NUM_SHARDS)]
        expected = sum_of(Node(0, NUM_SHARDS), leaves.__getitem__, torch.add)

        def total(rank, leaves=leaves):
            interpreter = interpreters[rank]
            for shard in ranges[rank]:
                interpreter.state.sums.put(Partial(Node(shard, 1), entries), leaves[shard])
            for instruction in interpreter.program.exchange:
                if not isinstance(instruction, WaitForBackward):
                    interpreter.execute(instruction)
            interpreter.hold_total()
            return interpreter.state.total

        with ThreadPoolExecutor(num_ranks) as pool:
            totals = list(pool.map(total, range(num_ranks)))
        for found in totals:
            if exchange in KEEPS_THE_TREE:
                assert torch.equal(found, expected)
            else:
                torch.testing.assert_close(found, expected)
