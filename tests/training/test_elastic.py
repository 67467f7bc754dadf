"""Which state the ranks of a new generation continue from."""

import numpy as np
import pytest

from lockstep.core.errors import LockstepError
from lockstep.report.events import EpochDone
from lockstep.training.checkpoint import Checkpoint, Progress
from lockstep.training.elastic import agree

IDENTITY = {"model": "lenet"}


def checkpoint(step, epoch=1, parts=("0:2",), run=None):
    """A checkpoint of these parts of a model; every value in it is its step."""
    history = [EpochDone(number, 1.0, 1.0, 0.5) for number in range(1, epoch)]
    progress = Progress(step=step, epoch=epoch, history=history, first_loss=1.0)
    weights = {f"W{part}": np.full(2, step, np.float32) for part in parts}
    return Checkpoint(
        run or IDENTITY, {}, progress, weights, {part: {"momentum": np.full(2, step, np.float32)} for part in parts}
    )


def agreed(on_ranks, states):
    return on_ranks(len(states), lambda engine: agree(engine, states[engine.local_ranks[0]], IDENTITY))


@pytest.mark.parametrize(
    ("positions", "newest"),
    [
        ([None, None], None),
        ([(3, 1), None], (3, 1)),
        ([(3, 1), (4, 1), (3, 1)], (4, 1)),
        ([(8, 1), (8, 2), (8, 1)], (8, 2)),  # one had evaluated the epoch when another was killed
        ([(8, 2), (9, 2)], (9, 2)),
    ],
)
def test_all_ranks_continue_from_the_newest_state_of_any(on_ranks, positions, newest):
    states = [None if position is None else checkpoint(*position) for position in positions]
    found, _ = agreed(on_ranks, states)
    assert [None if one is None else (one.progress.step, one.progress.epoch) for one in found] == [newest] * len(states)


def test_nothing_is_sent_where_all_ranks_have_the_same_state(on_ranks):
    states = [checkpoint(5), checkpoint(5)]
    found, num_broadcasts = agreed(on_ranks, states)
    assert all(one is own for one, own in zip(found, states, strict=True))
    assert num_broadcasts == 0


@pytest.mark.parametrize(
    ("held", "newest", "num_broadcasts"),
    [
        ([(4, ["0:2"]), (4, ["2:5"])], 4, 2),
        ([(5, ["0:2"]), (4, ["2:5"]), (4, ["0:2"]), (4, ["2:5"])], 4, 2),  # nobody has 2:5 of step 5
        ([(5, ["0:2"]), (4, ["2:5"]), (4, ["0:2"]), (5, ["2:5"])], 5, 2),
        ([(5, ["0:2", "2:5"]), (4, ["2:5"])], 5, 1),
        ([(5, ["0:2"]), None, (5, ["2:5"]), None], 5, 2),  # two ranks are new
    ],
)
def test_parts_of_the_model_are_merged_from_the_newest_step_of_which_all_are_there(
    on_ranks, held, newest, num_broadcasts
):
    states = [None if one is None else checkpoint(one[0], parts=one[1]) for one in held]
    found, sent = agreed(on_ranks, states)
    for state in found:
        assert state.progress.step == newest
        assert sorted(state.weights) == ["W0:2", "W2:5"]
        assert sorted(state.states) == ["0:2", "2:5"]
        assert all((array == newest).all() for array in state.weights.values())
        assert all((part["momentum"] == newest).all() for part in state.states.values())
    assert sent == num_broadcasts


def test_a_state_of_another_run_is_refused(on_ranks):
    states = [checkpoint(3), checkpoint(9, run={"model": "another"})]
    with pytest.raises(LockstepError, match="is of another run, or of other settings"):
        agreed(on_ranks, states)
