"""Where the time goes: spans that do not overlap, a file that Chrome reads, and what a perfect speed-up was lost to."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from lockstep.core import tracing
from lockstep.core.tracing import Span, Trace, chrome_trace, lost_time, span, traced, with_waits


def test_a_span_within_another_interrupts_it():
    trace = Trace()
    with traced(trace), span("outer"), span("inner"):
        pass
    assert [one.name for one in trace.spans] == ["outer", "inner", "outer"]
    assert all(before.end == after.start for before, after in pairwise(trace.spans))


def test_no_span_is_recorded_unless_the_thread_is_traced():
    trace = Trace()
    with traced(trace):
        pass
    with span("forward"):
        pass
    assert trace.spans == []


def test_an_error_leaves_no_span_open():
    trace = Trace()
    with traced(trace):
        with pytest.raises(ValueError, match="mine"), span("forward"):
            raise ValueError("mine")
        with span("backward"):
            pass
    assert [one.name for one in trace.spans] == ["forward", "backward"]


def test_the_number_of_spans_is_limited(monkeypatch):
    monkeypatch.setattr(tracing, "MAX_SPANS", 3)
    trace = Trace()
    with traced(trace):
        for _ in range(5):
            with span("forward"):
                pass
    assert len(trace.spans) == 3


def test_the_time_between_two_spans_of_a_step_is_waiting():
    spans = [Span("update", 1, 3.0, 4.0), Span("forward", 1, 0.0, 1.0), Span("forward", 2, 6.0, 7.0)]
    assert with_waits(spans) == [
        Span("forward", 1, 0.0, 1.0),
        Span("wait", 1, 1.0, 3.0),
        Span("update", 1, 3.0, 4.0),
        Span("forward", 2, 6.0, 7.0),
    ]


def test_lost_and_perfect_time_add_up_to_the_step():
    ranks = [
        [Span("data", 2, 0, 1), Span("forward", 2, 1, 4), Span("exchange", 2, 5, 7), Span("update", 2, 7, 9)],
        [Span("data", 2, 0, 1), Span("forward", 2, 1, 5), Span("exchange", 2, 5, 7), Span("update", 2, 7, 9)],
    ]
    lost = lost_time(ranks)
    assert lost.step == pytest.approx(9000)
    assert lost.to == {"update": 1000, "exchange": 2000, "wait": 500}
    assert lost.perfect + sum(lost.to.values()) == pytest.approx(lost.step)
    assert lost_time([[Span("forward", 1, 0, 1)]]).to == {}


def test_the_first_step_is_not_counted_unless_it_is_the_only_one():
    first, second = Span("forward", 1, 0, 100), Span("forward", 2, 100, 101)
    assert lost_time([[first, second]]).step == pytest.approx(1000)
    assert lost_time([[first]]).step == pytest.approx(100_000)


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_a_traced_run_records_what_every_device_did(lockstep, tiny, tmp_path, engine):
    how = ("--data", tiny, "--batch-size", 65, "--epochs", 1, "--devices", 2, "--engine", engine, "--json")
    plain = lockstep("train", *how, "--out", tmp_path / "plain")
    answer = lockstep("train", *how, "--trace", "--out", tmp_path / "run")
    assert answer.status == 0, answer.err
    assert answer.json["weights_sha256"] == plain.json["weights_sha256"]
    assert not (tmp_path / "plain" / "trace.json").exists()
    pattern = r"^a step took [\d.]+ ms; ideal 2x scaling: [\d.]+ ms; overhead: .*exchange [\d.]+ ms"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (sentence,) = [line["sentence"] for line in lines if line["event"] == "traced"]
    assert re.search(pattern, sentence)
    assert engine == "processes" or sentence in answer.err  # workers write to the terminal themselves
    events = json.loads((tmp_path / "run" / "trace.json").read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {0: "rank 0 (cpu:0)", 1: "rank 1 (cpu:1)"}
    for rank in rows:
        own = sorted((event for event in events if event["ph"] == "X" and event["tid"] == rank), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in pairwise(own))
        counted = Counter(event["name"] for event in own)
        steps = answer.json["steps"]
        updates = [event["args"]["step"] for event in own if event["name"] == "update"]
        assert updates == [*range(1, steps + 1)]
        assert counted["forward"] == counted["backward"] == 4 * steps  # each rank has four shards
        assert {"data", "exchange", "wait"} <= set(counted)


def test_a_trace_starts_at_zero():
    events = chrome_trace([[Span("forward", 1, 100.0, 100.5)]], [[]], ["cpu:0"])
    assert events[1] == {
        "name": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 500000.0, "args": {"step": 1}
    }  # fmt: skip


def test_an_overlapped_exchange_is_the_row_below():
    exchanges = [[Span("exchange", 1, 100.2, 100.3)], []]
    events = chrome_trace([[Span("backward", 1, 100.0, 100.5)]] * 2, exchanges, ["cpu:0", "cpu:1"])
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        "rank 0 (cpu:0)", "rank 0, overlapped exchange", "rank 1 (cpu:1)"
    ]  # fmt: skip
    assert [(event["tid"], event["name"], event["ts"]) for event in events if event["ph"] == "X"] == [
        (0, "backward", 0.0), (1, "exchange", 200000.0), (2, "backward", 0.0)
    ]  # fmt: skip


def test_the_spans_of_the_overlapped_exchange_are_of_the_same_step():
    trace = Trace()
    trace.start_step(7)
    with traced(trace.exchange), span("exchange"):
        pass
    assert [(one.name, one.step) for one in trace.exchange.spans] == [("exchange", 7)]
    assert trace.spans == []
