"""The interpreter: what it holds, and for how long."""

import math
import weakref

import numpy as np
import pytest

from lockstep.backends import load_backend
from lockstep.core.device import Device
from lockstep.data.batch import Batch
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.buckets import bucket_ranges
from lockstep.partition.ranks import split_over_ranks
from lockstep.replicas.replica import Leaf
from lockstep.runtime.engine import Position, Rank, StepInput
from lockstep.runtime.inprocess import InProcess
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.thread_transport import ThreadGroup

ENTRIES = range(64)


class Vector(np.ndarray):
    """An array that can be counted while it is alive."""


class CountingReplica:
    """Its leaves are random vectors; it knows how many of them, and of their sums, are alive."""

    entries = ENTRIES

    def __init__(self):
        self.alive, self.most_alive, self.total = weakref.WeakSet(), 0, None

    def begin_step(self, step):
        pass

    def forward_backward(self, shards, all_gather):
        leaves = []
        for shard in shards:
            vector = np.random.RandomState(shard.number).standard_normal(len(ENTRIES)).astype(np.float32).view(Vector)
            self.alive.add(vector)
            self.most_alive = max(self.most_alive, len(self.alive))
            leaves.append(Leaf(vector, np.float32(shard.number)))
        return leaves

    def update(self, step, total, batch):
        self.total = np.array(total)

    def finish_update(self):
        pass


@pytest.fixture(autouse=True)
def vectors_are_weakly_hashable(monkeypatch):
    monkeypatch.setattr(Vector, "__hash__", lambda self: id(self), raising=False)
    monkeypatch.setattr(Vector, "__eq__", lambda self, other: self is other, raising=False)


def run(num_ranks, num_shards, bucket_mb=0.0, exchange="sharded"):
    split = DataParallel(
        tuple(split_over_ranks(num_shards, num_ranks)), ENTRIES, bucket_ranges(ENTRIES, bucket_mb, num_ranks), exchange
    )
    replicas = [CountingReplica() for _ in range(num_ranks)]
    work = StepInput(
        1, Batch(num_shards, lambda rank, start, stop: (None, None)), [range(n, n + 1) for n in range(num_shards)]
    )
    with InProcess(load_backend("numpy"), [Device(f"cpu:{rank}") for rank in range(num_ranks)]) as engine:
        result = engine.run(data_parallel(split), replicas, work)
    assert result.losses == list(range(num_shards))
    return replicas


@pytest.mark.parametrize("num_shards", [1, 2, 5, 8, 16, 31])
def test_few_leaves_are_alive_at_a_time(num_shards):
    """A leaf is dropped when it has been added, so memory grows with the logarithm of the number of shards."""
    (replica,) = run(1, num_shards)
    assert replica.most_alive <= math.ceil(math.log2(num_shards)) + 2


@pytest.mark.parametrize("exchange", ["sharded", "gather", "tree"])
@pytest.mark.parametrize("bucket_mb", [0.0, 64e-6])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_rank_updates_with_the_same_total(num_ranks, bucket_mb, exchange):
    (alone,) = run(1, 8)
    for replica in run(num_ranks, 8, bucket_mb, exchange):
        np.testing.assert_array_equal(replica.total, alone.total)


def test_an_interpreter_can_be_cancelled_before_its_first_step():
    split = DataParallel(tuple(split_over_ranks(4, 2)), ENTRIES, bucket_ranges(ENTRIES, 0.0001, 2))
    device, backend, cancelled = Device("cpu:0"), load_backend("numpy"), []
    group = ThreadGroup(backend, [device, device], [device, device])
    transport = group.transport(0)
    transport.cancel = lambda: cancelled.append(True)
    Interpreter(Rank(0, device, backend, Position()), data_parallel(split), transport).cancel()
    assert cancelled
