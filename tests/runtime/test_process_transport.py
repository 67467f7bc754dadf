"""Vectors in parts through the rounds of every exchange, with a group that hands tensors over in one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.runtime.process_transport import Wire
from lockstep.schedules.exchanges import EXCHANGES, KEEPS_THE_TREE, schedule_for
from lockstep.schedules.reduction_tree import Node, maximal_nodes, sum_of
from lockstep.partition.buckets import bucket_ranges
from lockstep.partition.ranks import split_over_ranks

NUM_SHARDS = 8


class Hub:
    """Where messages wait for who they are for."""

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


class HandedOver:
    """A rank's side of a hub."""

    place = torch.device("cpu")

    def __init__(self, hub, rank):
        self._hub, self.rank, self._receives = hub, rank, {}

    def begin(self, number, sends, receives):
        for target, tensor in sends:
            self._hub.put((self.rank, target, number), tensor)
        self._receives[number] = receives

    def finish(self, number):
        for source, tensor in self._receives.pop(number):
            tensor.copy_(self._hub.get((source, self.rank, number)))


@pytest.mark.parametrize("size", [1, 5, 64, 257])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_rank_has_the_total_twice_in_a_row(exchange, num_ranks, size):
    ranges, hub = tuple(split_over_ranks(NUM_SHARDS, num_ranks)), Hub()
    places = bucket_ranges(size, bucket_mb=240e-6, num_ranks=2)  # also parts that are smaller than there are ranks
    wires = [Wire(HandedOver(hub, rank), schedule_for(exchange, ranges), places) for rank in range(num_ranks)]
    for seed in range(2):
        random = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(size, generator=random) for _ in range(NUM_SHARDS)]
        expected = sum_of(Node(0, NUM_SHARDS), leaves.__getitem__, torch.add)

        def total(rank, leaves=leaves):
            own = maximal_nodes(ranges[rank], NUM_SHARDS)
            nodes = {node: sum_of(node, leaves.__getitem__, torch.add) for node in own}
            way_out = wires[rank].start()
            for number, place in enumerate(way_out.places):
                part = {node: vector[place.start : place.stop] for node, vector in nodes.items()}
                way_out.leave(number, lambda part=part: part)
            return wires[rank].travel()

        with ThreadPoolExecutor(num_ranks) as pool:
            totals = list(pool.map(total, range(num_ranks)))
        for found in totals:
            if exchange in KEEPS_THE_TREE:
                assert torch.equal(found, expected)
            else:
                torch.testing.assert_close(found, expected)
