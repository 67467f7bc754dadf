"""Spans: they do not overlap, say which shard they are of, and are read from the clock of a GPU where there is one."""

import threading
from itertools import pairwise

import pytest

from lockstep.core import tracing
from lockstep.core.tracing import HostTrace, Span, SpanName, Trace, span, traced, with_waits


def test_a_span_within_another_interrupts_it():
    trace = Trace()
    with traced(trace), span(SpanName.COMPUTE), span(SpanName.FORWARD):
        pass
    assert [one.name for one in trace.spans] == ["forward and backward", "forward", "forward and backward"]
    assert all(before.end == after.start for before, after in pairwise(trace.spans))


def test_a_span_within_another_of_the_same_name_is_the_same_span():
    trace = Trace()
    with traced(trace), span(SpanName.FORWARD, 3, 1), span(SpanName.FORWARD):
        pass
    assert [one[::4] for one in trace.spans] == [("forward", 3)]


def test_a_span_is_of_the_shard_and_stage_of_the_one_around_it():
    trace = Trace()
    with traced(trace), span(SpanName.COMPUTE, 5, 1), span(SpanName.FORWARD), span(SpanName.WAIT, stage=2):
        pass
    assert {(one.name, one.shard, one.stage) for one in trace.spans} == {
        ("forward and backward", 5, 1), ("forward", 5, 1), ("wait", 5, 2)
    }  # fmt: skip


def test_no_span_is_recorded_unless_the_thread_is_traced():
    trace = Trace()
    with traced(trace), traced(None), span(SpanName.FORWARD):
        pass
    with span(SpanName.FORWARD):
        pass
    assert trace.spans == []


def test_after_a_part_that_is_not_traced_the_rest_is():
    trace = Trace()
    with traced(trace):
        with traced(None):
            pass
        with span(SpanName.FORWARD):
            pass
    assert len(trace.spans) == 1


def test_an_error_leaves_no_span_open():
    trace = Trace()
    with traced(trace):
        with pytest.raises(ValueError, match="mine"), span(SpanName.FORWARD):
            raise ValueError("mine")
        with span(SpanName.BACKWARD):
            pass
    assert [one.name for one in trace.spans] == ["forward", "backward"]


def test_a_step_is_traced_as_a_whole_or_not_at_all(monkeypatch):
    monkeypatch.setattr(tracing, "MAX_SPANS", 3)
    trace = Trace()
    with traced(trace):
        for step in range(1, 4):
            trace.start_step(step)
            for _ in range(2):
                with span(SpanName.FORWARD):
                    pass
    assert [one.step for one in trace.spans] == [1, 1, 2, 2]


def test_the_time_between_two_spans_of_a_step_is_waiting():
    spans = [Span("update", 1, 3.0, 4.0), Span("forward", 1, 0.0, 1.0), Span("forward", 2, 6.0, 7.0)]
    assert with_waits(spans) == [
        Span("forward", 1, 0.0, 1.0),
        Span("wait", 1, 1.0, 3.0),
        Span("update", 1, 3.0, 4.0),
        Span("forward", 2, 6.0, 7.0),
    ]


def test_the_spans_of_the_overlapped_exchange_are_of_the_same_step():
    trace = Trace()
    trace.start_step(7)
    with traced(trace.exchange), span(SpanName.EXCHANGE):
        pass
    assert [(one.name, one.step) for one in trace.exchange.spans] == [("exchange", 7)]
    assert trace.spans == []


def test_what_the_loop_does_is_traced_after_an_error_too():
    host = HostTrace()
    with pytest.raises(ValueError, match="mine"), host.span(SpanName.STEP, 4):
        raise ValueError("mine")
    assert [(one.name, one.step) for one in host.spans] == [("step", 4)]


class FakeGpu:
    """A device whose clock is a list: what was launched takes one second each, and the host is far ahead of it."""

    def __init__(self):
        self.num_events, self.is_capturing = 0, False

    def record(self):
        if self.is_capturing:
            return None
        self.num_events += 1
        return self.num_events

    def seconds(self, event):
        return 100.0 + event


def test_the_work_of_a_gpu_is_read_from_its_own_clock():
    trace, waits = Trace(FakeGpu()), []
    trace.start_step(2)
    with traced(trace, lambda: waits.append(1)), span(SpanName.COMPUTE, synchronizes=True), span(SpanName.FORWARD, 3):
        pass
    assert len(waits) == 1  # at the end of a phase, and not of every span
    assert trace.take_device_spans() == [
        Span("forward and backward", 2, 101.0, 104.0), Span("forward", 2, 102.0, 103.0, 3)
    ]  # fmt: skip
    assert trace.take_device_spans() == []


def test_waiting_is_no_work_of_a_gpu():
    trace = Trace(FakeGpu())
    with traced(trace), span(SpanName.WAIT), span(SpanName.EXCHANGE):
        pass
    assert trace.take_device_spans() == []
    assert len(trace.spans) == 3


def test_what_is_captured_has_no_events():
    gpu = FakeGpu()
    trace = Trace(gpu)
    with traced(trace), span(SpanName.UPDATE):
        gpu.is_capturing = True
        with span(SpanName.FORWARD):
            pass
        gpu.is_capturing = False
    assert [one.name for one in trace.take_device_spans()] == ["update"]


def test_threads_have_traces_of_their_own():
    trace = Trace()

    def work():
        with span(SpanName.FORWARD):
            pass

    with traced(trace):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert trace.spans == []
