"""What a notebook's cell shows of a run, without a kernel; and events that come from another process."""

import os

import pytest

from lockstep.report import notebook
from lockstep.report.console import Console
from lockstep.report.events import EpochDone, Incident, RunDone, StepDone, Traced
from lockstep.report.notebook import Forward, NotebookDisplay, event_of, in_notebook, run_display


@pytest.fixture
def outputs(monkeypatch):
    """The outputs of a cell, instead of a kernel."""
    found = []

    class Handle:
        def update(self, shown, raw):
            found.append(shown)

    def display(shown, raw, display_id):
        found.append(shown)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(notebook, "SECONDS", 0.0)
    return found


def test_the_bar_and_the_curve_grow_and_the_bar_goes(outputs, make_started, make_result, tmp_path):
    result = make_result(run=tmp_path)
    with NotebookDisplay() as display:
        display.show(make_started())
        for step in (1, 2, 3):
            display.show(StepDone(1, step, 256, loss=2.0 / step, learning_rate=0.2, seconds=0.1 * step))
        during = outputs[-1]["text/html"]
        for done in result.history:
            display.show(done)
        display.show(Incident("eager", "a < b"))
        display.show(RunDone(result))
    assert 'value="3"' in during
    assert "loss 0.6667" in during
    assert during.count("<svg") == 1, "there is no accuracy yet"
    after = outputs[-1]
    assert "<progress" not in after["text/html"]
    assert after["text/html"].count("<svg") == 2
    assert "a &lt; b" in after["text/html"]
    assert "epoch 2/2  loss 0.5000  test acc 0.8437" in after["text/plain"]
    assert f"recorded in {tmp_path}" in after["text/plain"]


def test_outside_a_notebook_it_is_the_terminal():
    assert not in_notebook()
    assert isinstance(run_display(), Console)


def test_events_arrive_as_they_were_sent(make_started, make_result):
    receiving, sending = os.pipe()
    result = make_result()
    events = [make_started(), EpochDone(1, 1.0, 0.5, 0.7), Incident("healed", "so"), Traced([{"a": 1}], "took 3 ms")]
    events += [StepDone(1, 2, 3, 0.5, 0.1, 2.0), RunDone(result)]
    forward = Forward(sending)
    for event in events:
        forward.write(event)
    os.close(sending)
    with open(receiving) as lines:
        found = [event_of(line) for line in lines]
    assert found[:3] == events[:3]
    assert found[3] == Traced([], "took 3 ms")
    assert found[4] == events[4]
    assert found[5].result.summary() == {**result.summary()}
