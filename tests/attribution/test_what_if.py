"""Other numbers of shards and other shares on the clock: a step is what it was, and the difference of two schedules."""

import pytest

from lockstep.attribution.step_times import References, TracedRun
from lockstep.attribution.what_if import WhatIf
from lockstep.core.chrome_trace import RankSpans
from lockstep.core.tracing import Span
from lockstep.parallel.data import DataParallel, data_parallel

MS = 1e-3


def make_schedule(num_shards, own):
    assert sum(map(len, own)) == num_shards
    return data_parallel(DataParallel(own, range(10), (range(10),), "gather"))


def what_if(*seconds_of_a_shard, references=None, num_shards=8):
    """Ranks that take so long for a shard, of which all have as many."""
    own, ranks = num_shards // len(seconds_of_a_shard), []
    for rank, seconds in enumerate(seconds_of_a_shard):
        spans = []
        for step in (1, 2, 3):
            at = 10.0 * step
            for number in range(own):
                spans.append(Span("forward", step, at, at + seconds, rank * own + number))
                at += seconds
            spans.append(Span("update", step, at, at + MS))
        ranks.append(RankSpans(rank, f"cpu:{rank}", 0, spans))
    loop = [Span("step", step, 10.0 * step, 10.0 * step + 5.0) for step in (1, 2, 3)]
    run = TracedRun(ranks, {0: loop}, dict.fromkeys((1, 2, 3), 64), num_shards, [0] * len(ranks), references=references)
    return WhatIf(run, make_schedule)


def test_the_same_number_of_shards_takes_as_long():
    assert what_if(5 * MS, 5 * MS).step_ms(42.0, 8) == pytest.approx(42.0)


def test_fewer_shards_are_as_fast_as_they_were_measured():
    references = References({8: 5 * MS, 16: 6 * MS, 32: 8 * MS}, 40 * MS, 1.0)
    found = what_if(5 * MS, 5 * MS, references=references)
    assert found.numbers() == [2, 4, 8, 16]
    assert found.step_ms(100.0, 4) == pytest.approx(100.0 - 20 + 12)  # two of 6 ms instead of four of 5 ms on each rank
    assert found.step_ms(100.0, 2) == pytest.approx(100.0 - 20 + 8)


def test_ranks_that_slow_each_other_down_still_do_with_other_shards():
    references = References({8: 4 * MS, 16: 5 * MS}, 40 * MS, 1.25)
    found = what_if(5 * MS, 5 * MS, references=references)
    assert found.step_ms(100.0, 4) == pytest.approx(100.0 - 20 + 2 * 5 * 1.25)


def test_shares_by_speed_keep_every_shard():
    assert what_if(5 * MS, 15 * MS).balanced_ms(100.0) == pytest.approx(100.0 - 60 + 30)  # six and two shards


def test_there_are_never_fewer_shards_than_devices():
    references = References({8: 5 * MS, 16: 6 * MS, 32: 8 * MS, 64: 9 * MS}, 40 * MS, 1.0)
    assert min(what_if(5 * MS, 5 * MS, references=references).numbers()) == 2
