"""The clock of a GPU, with events that keep time as CUDA's do."""

import numpy as np
import pytest
import torch

from lockstep.backends.torch.events import CudaEvents
from lockstep.core.tracing import SpanName, Trace, span, traced

STEP_MS, NUM_STEPS = 7.3, 100_000  # twelve minutes


class Gpu:
    """A GPU whose work takes the time that the test says."""

    def __init__(self):
        self.now_ms, self.is_capturing = 0.0, False

    def synchronize(self):
        """It is idle."""


class Event:
    """A moment; how far two are apart comes as a number with 24 bits."""

    gpu: Gpu

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert not self.gpu.is_capturing, "a graph would contain it"
        self.at_ms = self.gpu.now_ms

    def synchronize(self):
        """It is over."""

    def elapsed_time(self, later):
        return float(np.float32(later.at_ms - self.at_ms))


@pytest.fixture
def gpu(monkeypatch):
    found = Event.gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.is_capturing)
    return found


def test_spans_of_a_long_run_are_as_long_as_those_of_a_short_one(gpu):
    trace = Trace(CudaEvents(torch.device("cpu")))
    with traced(trace):
        for step in range(NUM_STEPS):
            trace.start_step(step)
            with span(SpanName.COMPUTE):
                gpu.now_ms += STEP_MS
    spans = trace.take_device_spans()
    assert len(spans) == NUM_STEPS
    assert max(abs(1e3 * one.seconds - STEP_MS) for one in spans) < 1e-3
    assert 1e3 * (spans[-1].end - spans[0].start) == pytest.approx(NUM_STEPS * STEP_MS, rel=1e-7)
    assert [one.step for one in spans] == list(range(NUM_STEPS))


def test_nothing_is_recorded_into_a_graph_that_is_captured(gpu):
    events = CudaEvents(torch.device("cpu"))
    gpu.is_capturing = True
    assert events.record() is None
    gpu.is_capturing = False
    assert events.record() is not None
