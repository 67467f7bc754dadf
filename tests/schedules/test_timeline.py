"""Schedules on a clock: pipelines are idle for as long as theory says, and nobody uses what is not there yet."""

from itertools import pairwise

import pytest

from lockstep.parallel.combined import ModelSplit, StageShape, combined
from lockstep.partition.grid import Grid
from lockstep.partition.ranks import split_over_ranks
from lockstep.report.schedule_picture import BACKWARD, FORWARD, UPDATE, idle_share
from lockstep.schedules.timeline import Costs, timeline


def schedule_of(grid, num_shards, order="1f1b", stages=None):
    stages = stages or tuple(range(grid.network))
    own = [[stage for stage, place in enumerate(stages) if place == at] for at in range(grid.network)]
    parts = tuple(
        tuple(StageShape(stage, range(8 * n, 8 * n + 8)) for n, stage in enumerate(own[part // grid.layers]))
        for part in range(grid.num_parts)
    )
    split = ModelSplit(grid, stages, parts, order, gathers_norms=False)
    return combined.__wrapped__(split.step(tuple(split_over_ranks(num_shards, grid.data)), "sharded", together=False))


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_shards", [1, 2, 5, 8, 16])
def test_a_pipeline_of_equal_stages_is_idle_for_as_long_as_theory_says(order, num_stages, num_shards):
    boxes = timeline(schedule_of(Grid(network=num_stages), num_shards, order))
    assert idle_share(boxes) == pytest.approx((num_stages - 1) / (num_shards + num_stages - 1))
    assert max(box.end for box in boxes) == 3 * (num_shards + num_stages - 1)


@pytest.mark.parametrize("stages", [(0, 1, 2), (0, 1, 0), (0, 1, 2, 1, 0), (0, 1, 1, 0)])
def test_a_pass_begins_after_what_it_needs_and_a_device_does_one_at_a_time(stages):
    costs = Costs(forward_seconds=1, backward_seconds=2.5, update_seconds=1, communication=0.25)
    boxes = timeline(schedule_of(Grid(network=max(stages) + 1), 7, stages=stages), costs)
    at = {(box.kind, box.shard, box.stage): box for box in boxes if box.kind != UPDATE}
    assert len(at) == 2 * 7 * len(stages)
    for (kind, shard, stage), box in at.items():
        before = at.get((kind, shard, stage - 1 if kind == FORWARD else stage + 1), at[FORWARD, shard, stage])
        if before is not box:
            is_sent = before.rank != box.rank
            assert box.start >= before.end + costs.communication * is_sent
    for rank in range(max(stages) + 1):
        own = sorted((box for box in boxes if box.rank == rank), key=lambda box: box.start)
        assert all(first.end <= second.start for first, second in pairwise(own))
        assert own[-1].kind == UPDATE
    assert max(box.start for box in boxes if box.kind == BACKWARD) < max(box.start for box in boxes)


def test_devices_that_share_layers_take_a_shard_at_the_same_time():
    boxes = timeline(schedule_of(Grid(network=2, layers=2), 4))
    of_rank = [[box[1:] for box in boxes if box.rank == rank] for rank in range(4)]
    assert of_rank[0] == of_rank[1]
    assert of_rank[2] == of_rank[3]


def test_devices_that_share_data_are_never_idle_where_shards_are_equal():
    assert idle_share(timeline(schedule_of(Grid(data=2), 8))) == 0
    assert idle_share(timeline(schedule_of(Grid(data=2), 7))) == pytest.approx(1 / 8)


def test_stages_may_take_different_times():
    boxes = timeline(schedule_of(Grid(network=2), 1), Costs(stages=(1, 3)))
    assert {(box.kind, box.stage): box.end - box.start for box in boxes} == {
        (FORWARD, 0): 1, (BACKWARD, 0): 2, (FORWARD, 1): 3, (BACKWARD, 1): 6
    }  # fmt: skip
