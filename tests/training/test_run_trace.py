"""What a traced run sends from process to process: spans arrive as they were, also where the clock is another."""

from lockstep.core.serialization import pack, unpack
from lockstep.core.tracing import MAX_SPANS, Span, SpanName
from lockstep.training.run_trace import _packed, _shift, _unpacked

SPANS = [Span(SpanName.FORWARD, 3, 1.5, 2.25, 7, 1), Span(SpanName.WAIT, 4, 2.25, 1e6 / 3)]


def test_spans_arrive_as_they_were():
    assert _unpacked(unpack(pack({"a": _packed(SPANS)}))["a"], 0.0) == SPANS
    assert _unpacked(unpack(pack({"a": _packed([])}))["a"], 0.0) == []


def test_as_many_spans_as_a_rank_may_have_can_be_sent():
    rows = {name: _packed(SPANS * (MAX_SPANS // 2)) for name in ("spans", "exchange", "on_device", "host")}
    assert len(unpack(pack(rows))["host"]) == MAX_SPANS


def test_only_the_clock_of_another_machine_is_shifted():
    assert _shift(["boot", 100.0], ["boot", 100.5]) == 0.0
    assert _shift(["boot", 100.0], ["other", 160.0]) == 60.0
    assert _unpacked(_packed(SPANS), 60.0)[0] == Span("forward", 3, 61.5, 62.25, 7, 1)
