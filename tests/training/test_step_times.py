"""The time of an epoch leaves out compilation, and nothing else."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lockstep.config import RunConfig
from lockstep.report.events import EpochDone
from lockstep.runtime.step import Resolved
from lockstep.training import loop, state
from lockstep.training.loop import Training
from lockstep.training.resume_point import ResumePoint
from lockstep.training.setup import inprocess_engine, prepare
from lockstep.training.step_times import StepTimes


def extra(*steps):
    times = StepTimes()
    for num_samples, seconds in steps:
        times.add(num_samples, seconds)
    return times.first_steps_extra()


def test_only_what_the_first_step_took_longer_is_left_out():
    assert extra((256, 0.5), *[(256, 0.088)] * 11) == pytest.approx(0.5 - 0.088)


def test_a_step_of_another_size_is_compared_by_sample():
    assert extra((256, 0.088), *[(256, 0.088)] * 6, (128, 1.044)) == pytest.approx(1.0)
    assert extra((200, 1.2), (100, 0.5), (100, 0.1)) == pytest.approx(0.4 + 1.0)


def test_without_a_step_to_compare_with_nothing_is_left_out():
    assert extra((256, 5.0)) == 0.0
    assert extra() == 0.0


def test_a_first_step_that_was_fast_adds_nothing():
    assert extra((256, 0.05), (256, 0.088), (256, 0.088)) == 0.0


def test_later_epochs_have_no_first_steps():
    times = StepTimes()
    for seconds in (0.5, 0.1, 0.1):
        times.add(64, seconds)
    assert times.first_steps_extra() == pytest.approx(0.4)
    for seconds in (0.3, 0.1, 0.1):
        times.add(64, seconds)
    times.add(32, 0.25)  # the first of its size: 32 samples should take 0.05 s
    assert times.first_steps_extra() == pytest.approx(0.2)


def test_the_reported_time_of_an_epoch_is_that_of_its_steps(few, monkeypatch):
    """12 steps of 88 ms, of which the first takes 500 ms because the model is compiled."""
    clock = [0.0]

    class Steps:
        max_in_flight, why_eager, capture_seconds = 0, "", 0.0

        def run(self, step, batch):
            clock[0] += 0.5 if step == 1 else 0.088
            return Resolved([1.0], None)

    monkeypatch.setattr(state, "make_steps", lambda *arguments: Steps())
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    config = RunConfig(data=few, backend="numpy", devices=1, batch_size=2, num_epochs=2)
    prepared = prepare(config)
    with inprocess_engine(config, prepared) as engine:
        training = Training(replace(config, compile=True), prepared, engine, ResumePoint())
        epochs = [event for event in training.events() if isinstance(event, EpochDone)]
    assert [done.seconds for done in epochs] == pytest.approx([12 * 0.088, 12 * 0.088])
