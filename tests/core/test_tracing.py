"""Where the time goes: spans that do not overlap, a file that Chrome reads, and what a perfect speed-up lost."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from lockstep.core import tracing as trace
from lockstep.core.tracing import Span, Trace, chrome_trace, lost_time, span, traced, with_waits


def test_a_span_within_another_interrupts_it():
    own = Trace()
    with traced(own), span("outer"), span("inner"):
        pass
    assert [one.name for one in own.spans] == ["outer", "inner", "outer"]
    assert all(before.end == after.start for before, after in pairwise(own.spans))


def test_nothing_is_written_down_unless_the_thread_is_traced():
    own = Trace()
    with traced(own):
        pass
    with span("forward"):
        pass
    assert own.spans == []


def test_an_error_leaves_no_span_open():
    own = Trace()
    with traced(own):
        with pytest.raises(ValueError, match="mine"), span("forward"):
            raise ValueError("mine")
        with span("backward"):
            pass
    assert [one.name for one in own.spans] == ["forward", "backward"]


def test_a_trace_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(trace, "MAX_SPANS", 3)
    own = Trace()
    with traced(own):
        for _ in range(5):
            with span("forward"):
                pass
    assert len(own.spans) == 3


def test_waiting_is_what_lies_between_two_spans_of_a_step():
    spans = [Span("update", 1, 3.0, 4.0), Span("forward", 1, 0.0, 1.0), Span("forward", 2, 6.0, 7.0)]
    assert with_waits(spans) == [
        Span("forward", 1, 0.0, 1.0),
        Span("wait", 1, 1.0, 3.0),
        Span("update", 1, 3.0, 4.0),
        Span("forward", 2, 6.0, 7.0),
    ]


def test_what_was_lost_and_what_is_perfect_add_up_to_the_step():
    ranks = [
        [Span("data", 2, 0, 1), Span("forward", 2, 1, 4), Span("exchange", 2, 5, 7), Span("update", 2, 7, 9)],
        [Span("data", 2, 0, 1), Span("forward", 2, 1, 5), Span("exchange", 2, 5, 7), Span("update", 2, 7, 9)],
    ]
    lost = lost_time(ranks)
    assert lost.step == pytest.approx(9000)
    assert lost.to == {"update": 1000, "exchange": 2000, "wait": 500}
    assert lost.perfect + sum(lost.to.values()) == pytest.approx(lost.step)
    assert lost_time([[Span("forward", 1, 0, 1)]]).to == {}


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_a_traced_run_writes_what_every_device_did(lockstep, tmp_path, engine):
    how = ("--data", "fashion-mnist-mini", "--epochs", 1, "--devices", 2, "--engine", engine, "--json")
    plain = lockstep("train", *how, "--out", tmp_path / "plain")
    answer = lockstep("train", *how, "--trace", "--out", tmp_path / "run")
    assert answer.status == 0, answer.err
    assert answer.json["weights_sha256"] == plain.json["weights_sha256"]
    assert not (tmp_path / "plain" / "trace.json").exists()
    pattern = r"^a step took [\d.]+ ms; a perfect 2-fold speed-up would take [\d.]+; lost in ms: .*exchange [\d.]+"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (said,) = [line["sentence"] for line in lines if line["event"] == "traced"]
    assert re.search(pattern, said)
    assert engine == "processes" or said in answer.err  # workers write to the terminal themselves
    events = json.loads((tmp_path / "run" / "trace.json").read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {0: "rank 0 (cpu:0)", 1: "rank 1 (cpu:1)"}
    for rank in rows:
        own = sorted((event for event in events if event["ph"] == "X" and event["tid"] == rank), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in pairwise(own))
        counted = Counter(event["name"] for event in own)
        steps = answer.json["steps"]
        assert counted["update"] == steps
        assert counted["forward"] == counted["backward"] == 4 * steps  # each rank has four shards
        assert {"data", "exchange", "wait"} <= set(counted)


def test_the_rows_of_a_trace_begin_at_zero():
    events = chrome_trace([[Span("forward", 1, 100.0, 100.5)]], [[]], ["cpu:0"])
    assert events[1] == {
        "name": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 500000.0, "args": {"step": 1}
    }  # fmt: skip


def test_what_is_exchanged_beside_a_rank_is_the_row_below():
    beside = [[Span("exchange", 1, 100.2, 100.3)], []]
    events = chrome_trace([[Span("backward", 1, 100.0, 100.5)]] * 2, beside, ["cpu:0", "cpu:1"])
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        "rank 0 (cpu:0)", "rank 0, exchange beside it", "rank 1 (cpu:1)"
    ]  # fmt: skip
    assert [(event["tid"], event["name"], event["ts"]) for event in events if event["ph"] == "X"] == [
        (0, "backward", 0.0), (1, "exchange", 200000.0), (2, "backward", 0.0)
    ]  # fmt: skip
