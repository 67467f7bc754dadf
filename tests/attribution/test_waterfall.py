"""The waterfall on traces that are typed out: every part is found where it was put, and they add up to the step."""

import pytest

from lockstep.attribution.step_times import References, TracedRun
from lockstep.attribution.waterfall import PARTS, Explanation, explain_run
from lockstep.core.chrome_trace import RankSpans
from lockstep.core.tracing import Span
from lockstep.parallel.data import DataParallel, data_parallel

MS = 1e-3


def traced(ranks, loading=0.0, host=0.0, evaluation=0.0, num_steps=10, num_shards=4, **settings):
    """A run whose ranks do the same in every step: a list of (name, milliseconds, shard, stage) each."""
    now, loop = 0.0, []
    rows = [[] for _ in ranks]
    length = max(sum(ms for _, ms, *_ in spans) for spans in ranks)
    for step in range(1, num_steps + 1):
        loop.append(Span("loading", step, now, now + loading * MS))
        now += loading * MS
        began, now = now, now + host * MS / 2
        for row, spans in zip(rows, ranks, strict=True):
            at = now
            for name, ms, *place in spans:
                row.append(Span(name, step, at, at + ms * MS, *place))
                at += ms * MS
        now += length * MS + host * MS / 2
        loop.append(Span("step", step, began, now))
    loop.append(Span("evaluation", 0, now, now + evaluation * MS))
    shown = [RankSpans(number, f"cpu:{number}", 0, row) for number, row in enumerate(rows)]
    settings = {"parts": [0] * len(ranks), **settings}
    return TracedRun(shown, {0: loop}, dict.fromkeys(range(1, num_steps + 1), 64), num_shards, **settings)


def work(*shards, exchange=1.0, update=2.0, wait=0.0):
    """Passes of so many milliseconds, numbered, and what comes after them."""
    passes = [("forward", ms, number) for number, ms in shards]
    return [*passes, ("wait", wait), ("exchange", exchange), ("update", update)]


def make_schedule(num_shards, own):
    return data_parallel(DataParallel(own, range(10), (range(10),), "gather"))


def explained(run, make_schedule=make_schedule):
    found = explain_run(run, make_schedule)
    assert found.perfect_ms + sum(found.parts.values()) + found.rest_ms == pytest.approx(found.step_ms, abs=1e-6)
    assert list(found.parts) == list(PARTS)
    return found


def lost(found):
    """The parts that are there, rounded."""
    return {name: round(ms, 2) for name, ms in found.parts.items() if abs(ms) > 0.005}


EVEN = [work((0, 5.0), (1, 5.0)), work((2, 5.0), (3, 5.0))]


def test_a_run_on_one_device_waits_for_nobody():
    found = explained(traced([work((0, 5.0), (1, 5.0))]))
    assert (found.step_ms, found.perfect_ms) == (13.0, 12.0)
    assert lost(found) == {"smaller shards": 1.0}  # it has nobody to exchange with: these are additions


def test_what_every_device_repeats_is_no_speed_up():
    found = explained(traced(EVEN))
    assert (found.step_ms, found.perfect_ms) == (13.0, 11.0)
    assert lost(found) == {"exposed exchange": 1.0, "update": 1.0}
    divided = explained(traced(EVEN, divides_update=True))
    assert lost(divided) == {"exposed exchange": 1.0}


def test_loading_host_and_evaluation_are_told_apart():
    found = explained(traced(EVEN, loading=3.0, host=2.0, evaluation=40.0))
    assert lost(found) == {
        "loading": 3.0, "launch and host": 2.0, "exposed exchange": 1.0, "update": 1.0, "evaluation": 4.0
    }  # fmt: skip
    assert found.step_ms == pytest.approx(22.0)


def test_work_that_is_slowed_by_sharing_hardware_is_not_perfect():
    references = References(alone={16: 4 * MS}, together=20 * MS, slowdown=1.25)
    found = explained(traced(EVEN, references=references))
    assert lost(found) == {"shared hardware": 2.0, "exposed exchange": 1.0, "update": 1.0}
    assert found.perfect_ms == pytest.approx(9.0)


def test_shards_that_are_too_small_are_compared_with_larger_ones():
    references = References(alone={16: 5 * MS, 32: 6 * MS}, together=20 * MS, slowdown=1.0)
    found = explained(traced(EVEN, references=references))
    assert lost(found)["smaller shards"] == 4.0  # one shard of 32 takes 6 ms, two of 16 take 10
    assert "2 shards instead of 4" in found.advice
    assert "9.00 instead of 13.00 ms; other bits" in found.advice


def test_a_larger_shard_that_is_slower_is_no_reference():
    references = References(alone={16: 5 * MS, 32: 11 * MS}, together=20 * MS, slowdown=1.0)
    assert "smaller shards" not in lost(explained(traced(EVEN, references=references)))


def test_what_was_measured_after_the_run_is_scaled_to_what_was_measured_in_it():
    references = References(alone={16: 10 * MS, 32: 12 * MS}, together=40 * MS, slowdown=1.0)  # a slower moment
    assert lost(explained(traced(EVEN, references=references)))["smaller shards"] == 4.0


def test_a_slow_rank_is_the_loss_and_is_named():
    slow = [work((0, 5.0), (1, 5.0), wait=20.0), work((2, 15.0), (3, 15.0))]
    found = explained(traced(slow, settings={"balance": "equal"}))
    assert lost(found) == {"waiting for the slower rank": 20.0, "exposed exchange": 1.0, "update": 1.0}
    assert (found.straggler.rank, found.straggler.device, found.straggler.times_as_long) == (1, "cpu:1", 3.0)
    assert "Rank 1 (cpu:1) takes 3.00 times as long" in found.advice
    assert "--balance measured): 18.00 instead of 33.00 ms; the same bits" in found.advice  # three shards and one
    assert found.straggler.sentence() in found.sentence()


def test_uneven_shares_are_waiting_too_but_nobody_straggles():
    uneven = [work((0, 5.0), (1, 5.0), (2, 5.0)), work((3, 5.0), wait=10.0)]
    found = explained(traced(uneven))
    assert lost(found)["waiting for the slower rank"] == 5.0
    assert found.straggler is None


def test_a_rank_that_is_slow_now_and_then_is_no_straggler():
    assert explained(traced([work((0, 5.0)), work((1, 5.2), wait=-0.2)])).straggler is None


def test_a_slow_link_is_the_exchange_of_the_rank_that_waits_for_nobody():
    found = explained(traced([work((0, 5.0), wait=7.0), work((1, 10.0), exchange=3.0)]))
    assert lost(found)["exposed exchange"] == 3.0
    assert lost(found)["waiting for the slower rank"] == 5.0


def test_the_bubble_of_a_pipeline_is_what_no_link_could_save():
    # values take half a second from stage to stage; without that, a step would take nine seconds
    first = [("forward", 1, 0, 0), ("forward", 1, 1, 0), ("wait", 3), ("backward", 2, 0, 0), ("wait", 1)]
    first += [("backward", 2, 1, 0), ("update", 1)]
    second = [("wait", 1.5), ("forward", 1, 0, 1), ("backward", 2, 0, 1), ("forward", 1, 1, 1), ("backward", 2, 1, 1)]
    second += [("wait", 2.5), ("update", 1)]
    found = explained(traced([first, second], parts=[0, 1], divides_update=True), make_schedule=None)
    assert found.perfect_ms == 7.0  # six of passes, and the update
    assert lost(found) == {"bubble": 3.0, "exposed exchange": 1.0}


def test_without_references_that_is_said():
    assert "not told apart" in explained(traced(EVEN)).notes[0]
    assert explained(traced(EVEN, references=References({16: 5 * MS}, 20 * MS, 1.0))).notes == []


def test_a_run_with_nothing_to_gain_says_so():
    found = explained(traced([work((0, 50.0), exchange=0.1, update=0.1), work((1, 50.0), exchange=0.1, update=0.1)]))
    assert found.advice.startswith("Nothing to change")


def test_a_graph_that_runs_behind_the_host_hides_its_loading():
    step = [Span("forward and backward", n, n * 10 * MS, n * 10 * MS + 6 * MS) for n in range(1, 11)]
    step += [Span("update", n, n * 10 * MS + 6 * MS, n * 10 * MS + 8 * MS) for n in range(1, 11)]
    loop = []
    for n in range(1, 11):
        loop += [
            Span("loading", n, n * 10 * MS, (n * 10 + 1.5) * MS),
            Span("step", n, (n * 10 + 1.5) * MS, (n + 1) * 10 * MS),
        ]
    ranks = [RankSpans(0, "cuda:0", 0, [], [], step)]
    run = TracedRun(ranks, {0: loop}, dict.fromkeys(range(1, 11), 64), 8, [0], runs_ahead=True)
    found = explained(run)
    assert found.step_ms == pytest.approx(10.0)
    assert lost(found) == {"loading": 1.5, "launch and host": 0.5}
    assert found.perfect_ms == pytest.approx(8.0)


def test_an_explanation_survives_its_file():
    found = explained(traced([work((0, 5.0), (1, 5.0), wait=20.0), work((2, 15.0), (3, 15.0))]))
    assert Explanation.from_plain(found.summary()) == found
    assert repr(found) == str(found) == "\n".join(found.lines())  # as a notebook shows it
    assert set(found.plain()) == {"step_ms", "perfect_ms", "parts", "rest_ms", "advice"}


def test_the_waterfall_as_text_has_a_line_for_each_part():
    lines = explained(traced(EVEN)).lines()
    assert lines[1].startswith("2 times as fast as one")
    assert [line.split("  ")[0] for line in lines[2:12]] == [*(f"+ {name}" for name in PARTS), "+ rest"]
    assert "13.00" in lines[12]


def test_nothing_is_explained_where_no_step_was_traced():
    assert explain_run(TracedRun([RankSpans(0, "cpu:0", 0)], {0: []}, {}, 8, [0])) is None


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_bars_are_as_wide_as_the_terminal_has_room_for(width):
    found = Explanation(
        step_ms=10.0, perfect_ms=4.0, parts=dict.fromkeys(PARTS, 0.7), rest_ms=-0.001, advice="", num_devices=16
    )
    lines, default = found.lines(width), found.lines()
    assert max(map(len, lines)) <= max(width, 60), "names and numbers need that much"
    assert width < 83 or lines == default
    assert max(line.count("#") for line in default) == 12
    assert any(line.split()[:3] == ["+", "rest", "0.00"] for line in lines)
    assert "-0.00" not in "\n".join(lines)
