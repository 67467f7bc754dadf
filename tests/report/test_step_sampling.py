"""Which steps are written down: some hundred of a run, or as many as the user wants."""

import pytest

from lockstep.report.events import StepDone
from lockstep.report.step_sampling import LINES_PER_RUN, StepSampling


def steps_of(started, num_steps):
    sampling = StepSampling(started)
    per_epoch = started.steps_per_epoch
    found = {}
    for step in range(1, num_steps + 1):
        epoch, in_epoch = divmod(step - 1, per_epoch)
        event = StepDone(epoch + 1, step, 10, loss=1 / step, learning_rate=0.1, seconds=0.5 * (in_epoch + 1))
        if values := sampling.sampled(event):
            found[step] = values
    return found


def test_every_step_of_a_short_run_and_some_hundred_of_a_long_one(make_started):
    assert list(steps_of(make_started(), 16)) == list(range(1, 17))
    assert len(steps_of(make_started(num_epochs=1000), 8000)) == pytest.approx(LINES_PER_RUN, rel=0.3)


@pytest.mark.parametrize(("every", "steps"), [(5, [5, 10, 15]), (1, list(range(1, 17))), (0, [])])
def test_as_often_as_the_user_wants(make_started, every, steps):
    assert list(steps_of(make_started(log_every=every), 16)) == steps


def test_the_throughput_is_that_since_the_last_line_and_epochs_are_kept_apart(make_started):
    found = steps_of(make_started(log_every=3), 16)
    assert {step: values["samples_per_second"] for step, values in found.items()} == dict.fromkeys(found, 20.0)
    assert found[3] == {"loss": 1 / 3, "learning_rate": 0.1, "samples_per_second": 20.0}
