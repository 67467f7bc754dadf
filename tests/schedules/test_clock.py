"""The clock against numbers that can be worked out by hand."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from lockstep.parallel.combined import ModelSplit, StageShape, combined
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.buckets import bucket_ranges
from lockstep.partition.grid import Grid
from lockstep.partition.ranks import split_over_ranks
from lockstep.schedules.clock import BACKWARD, BUBBLE, EXCHANGE, FORWARD, UPDATE, Link, run_on_clock
from lockstep.schedules.instructions import Activation, ActivationGradient

ENTRIES = 1000
NO_LINK = Link()


@dataclass
class Costs:
    """One and two seconds for a shard, an update of half a second."""

    connection: Link = NO_LINK
    speeds: dict = field(default_factory=dict)
    is_shared: bool = False
    factor: float = 1.0
    addition: float = 0.0

    def forward(self, rank, shard, stage):
        return 1.0 / self.speeds.get(rank, 1)

    def backward(self, rank, shard, stage):
        return 2.0 / self.speeds.get(rank, 1)

    def add(self, rank, num_entries):
        return self.addition * num_entries

    def update(self, rank, num_entries):
        return 0.5

    def num_bytes(self, value):
        return 400 if isinstance(value, (Activation, ActivationGradient)) else 4 * len(value.entries)

    def link(self, rank, value=None):
        return self.connection

    def hardware(self, rank):
        return 0 if self.is_shared else rank

    def slowdown(self, kind, num_active):
        return self.factor if num_active > 1 else 1.0


def data_schedule(num_ranks, num_shards, bucket_mb=0.0):
    entries = range(ENTRIES)
    buckets = bucket_ranges(entries, bucket_mb, num_ranks)
    return data_parallel(DataParallel(tuple(split_over_ranks(num_shards, num_ranks)), entries, buckets))


def pipeline(num_stages, num_shards, data=1):
    parts = tuple((StageShape(stage, range(ENTRIES)),) for stage in range(num_stages))
    split = ModelSplit(Grid(data, num_stages), tuple(range(num_stages)), parts, "1f1b", gathers_norms=False)
    return combined(split.step(tuple(split_over_ranks(num_shards, data)), "sharded", together=False))


def test_one_rank_takes_the_sum_of_its_instructions():
    clocked = run_on_clock(data_schedule(1, 4), Costs(addition=0.001))
    assert clocked.seconds == pytest.approx(4 * 3 + 3 * 1.0 + 0.5)  # three additions of 1000 entries
    assert clocked.totals()[FORWARD] == 4


@pytest.mark.parametrize(("num_ranks", "num_shards", "most"), [(2, 8, 4), (3, 8, 3), (4, 8, 2), (8, 8, 1)])
def test_data_parallel_takes_as_long_as_the_rank_with_most_shards(num_ranks, num_shards, most):
    assert run_on_clock(data_schedule(num_ranks, num_shards), Costs()).seconds == pytest.approx(3 * most + 0.5)


def test_the_exchange_takes_latency_and_bandwidth_in_both_of_its_rounds():
    link = Link(latency=0.25, bandwidth=1000.0)
    clocked = run_on_clock(data_schedule(2, 8), Costs(link))
    assert clocked.seconds == pytest.approx(12 + 2 * (0.25 + 2000 / 1000) + 0.5)  # half of 4000 bytes, twice
    assert clocked.totals()[EXCHANGE] == pytest.approx(4.5)
    four = run_on_clock(data_schedule(4, 8), Costs(link)).seconds
    assert four == pytest.approx(6 + 2 * (0.25 + 3 * 1000 / 1000) + 0.5)  # three messages of a quarter, one by one


def test_an_exchange_in_buckets_hides_behind_the_backward_pass():
    link = Link(bandwidth=4000.0)
    apart = run_on_clock(data_schedule(2, 4), Costs(link)).seconds
    overlapped = run_on_clock(data_schedule(2, 4, bucket_mb=ENTRIES * 4e-6 / 4), Costs(link)).seconds
    assert apart == pytest.approx(6 + 1.0 + 0.5)
    assert overlapped == pytest.approx(6 + 0.5 + 0.5)  # two of the four buckets are left when backward is over


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("num_shards", [1, 4, 9])
def test_a_pipeline_of_equal_stages_has_the_bubble_of_theory(num_stages, num_shards):
    clocked = run_on_clock(pipeline(num_stages, num_shards), Costs())
    passes = 3 * (num_shards + num_stages - 1)
    assert clocked.seconds == pytest.approx(passes + 0.5)
    busy = clocked.totals()[FORWARD] + clocked.totals()[BACKWARD]
    assert 1 - busy / passes == pytest.approx((num_stages - 1) / (num_shards + num_stages - 1))
    assert clocked.totals()[BUBBLE] > 0


def test_activations_travel_over_the_link():
    clocked = run_on_clock(pipeline(2, 1), Costs(Link(latency=0.5, bandwidth=400.0)))
    there_and_back = 2 * (0.5 + 1)
    assert clocked.seconds == pytest.approx(6 + there_and_back + 0.5 + 0.5)  # and all are told that shards are done


def test_a_slow_device_holds_up_the_others():
    assert run_on_clock(data_schedule(2, 8), Costs(speeds={1: 0.5})).seconds == pytest.approx(24.5)


def test_ranks_on_the_same_hardware_slow_each_other_down_only_while_both_work():
    shared = run_on_clock(data_schedule(2, 8), Costs(is_shared=True, factor=1.5))
    assert shared.seconds == pytest.approx(1.5 * 12.5)
    uneven = run_on_clock(data_schedule(2, 3), Costs(is_shared=True, factor=1.5))  # 2 shards and 1
    assert uneven.seconds == pytest.approx(1.5 * 3 + 3 + 1.5 * 0.5)
    alone = run_on_clock(pipeline(2, 1), Costs(is_shared=True, factor=1.5))  # one stage at a time
    assert alone.seconds == pytest.approx(6 + 1.5 * 0.5)


def test_the_spans_of_a_rank_do_not_overlap_and_fill_the_step():
    clocked = run_on_clock(pipeline(3, 4, data=2), Costs(Link(latency=0.1, bandwidth=1e4)))
    for rank in range(6):
        own = sorted((span for span in clocked.spans if span.rank == rank), key=lambda span: span.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))
        assert own[-1].kind == UPDATE
        assert sum(span.end - span.start for span in own) == pytest.approx(own[-1].end)
    assert math.isclose(clocked.seconds, max(span.end for span in clocked.spans))


def test_sixty_four_devices_take_a_moment():
    assert run_on_clock(data_schedule(64, 256), Costs()).seconds == pytest.approx(12.5)
