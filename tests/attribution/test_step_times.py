"""The steps of a trace: what belongs to a step, which rank the others wait for, and how long a pipeline must take."""

import pytest

from lockstep.attribution.step_times import (
    HostStep,
    RankStep,
    TracedRun,
    counted_steps,
    critical_rank,
    host_steps,
    pipeline_seconds,
    rank_step,
)
from lockstep.core.chrome_trace import RankSpans
from lockstep.core.tracing import Span


def test_a_step_lasts_from_the_end_of_the_last_one_and_after_an_evaluation_from_its_first_batch():
    found = host_steps(
        [
            Span("loading", 1, 0.0, 1.0), Span("step", 1, 1.0, 3.0),
            Span("loading", 2, 4.0, 5.0), Span("step", 2, 5.0, 8.0), Span("step", 2, 8.0, 8.5),
            Span("evaluation", 0, 9.0, 20.0), Span("checkpoint", 0, 20.0, 30.0),
            Span("loading", 3, 31.0, 31.5), Span("step", 3, 32.0, 33.0),
        ]
    )  # fmt: skip
    assert found == {1: HostStep(3.0, 1.0), 2: HostStep(5.5, 1.0), 3: HostStep(2.0, 0.5)}


def test_the_parts_of_a_rank_s_step_add_up_to_it():
    spans = [
        Span("data", 1, 1.0, 1.5, 0), Span("forward", 1, 1.5, 3.0, 0), Span("forward and backward", 1, 3.0, 3.25),
        Span("wait", 1, 3.25, 4.0), Span("backward", 1, 4.0, 6.0, 1), Span("exchange", 1, 6.25, 7.0),
        Span("update", 1, 7.0, 8.0),
    ]  # fmt: skip
    found = rank_step(spans, HostStep(seconds=10.0, loading=0.5))
    assert found == RankStep(
        loading=0.5, passes=4.0, adds=0.25, idle=0.75, exchange=1.0, update=1.0, host=2.5, num_shards=2
    )
    assert found.seconds == 10.0


def test_the_shards_of_a_replayed_graph_count_as_one():
    spans = [Span("forward and backward", 1, 0.0, 3.0), Span("update", 1, 3.0, 4.0)]
    found = rank_step(spans, HostStep(4.0, 0.0))
    assert (found.passes, found.adds, found.num_shards) == (3.0, 0.0, 1)


def test_the_critical_rank_is_the_one_whose_gradients_are_ready_last_also_if_it_was_the_loading():
    slow_passes = RankStep(0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    slow_loading = RankStep(2.5, 1.0, 0.0, 9.0, 0.0, 0.0, 0.0, 1)
    assert critical_rank([slow_passes, slow_loading]) == 1


def run_of(host, *ranks):
    shown = [RankSpans(n, "cpu:0", 0, list(spans)) for n, spans in enumerate(ranks)]
    return TracedRun(shown, {0: host}, {1: 8, 2: 8, 3: 8}, 2, [0] * len(ranks))


def test_the_first_step_and_those_with_a_capture_are_not_counted_nor_those_that_a_rank_has_not_traced():
    host = [Span("step", 1, 0, 1), Span("step", 2, 1, 2), Span("step", 3, 2, 3)]
    updates = [Span("update", step, step - 0.5, step) for step in (1, 2, 3)]
    assert counted_steps(run_of(host, updates)) == [2, 3]
    assert counted_steps(run_of(host, updates, updates[:2])) == [2]
    assert counted_steps(run_of([*host[:2], Span("capture", 3, 2, 3)], updates)) == [2]
    assert counted_steps(run_of(host[:1], updates)) == [1]  # it is all there is
    assert counted_steps(run_of([], [])) == []


def passes(stage, *turns):
    """Passes of a stage, one second forward and two back, as F0, B0, ...; when they were done does not matter."""
    return [
        Span("forward" if turn[0] == "F" else "backward", 1, 0.0, 1.0 if turn[0] == "F" else 2.0, int(turn[1:]), stage)
        for turn in turns
    ]


@pytest.mark.parametrize("num_shards", [1, 4, 8])
def test_a_pipeline_takes_as_long_as_theory_says(num_shards):
    there = [f"F{n}" for n in range(num_shards)]
    back = [f"B{n}" for n in range(num_shards)]
    stages = [passes(stage, *there, *back) for stage in range(3)]
    assert pipeline_seconds(stages) == 3 * (num_shards + 2)  # (S + P - 1) passes of three seconds


def test_ranks_that_do_not_wait_for_each_other_take_as_long_as_the_longest():
    assert pipeline_seconds([passes(0, "F0", "B0"), passes(0, "F1", "B1", "F2")]) == 4.0
    assert pipeline_seconds([]) == 0.0
