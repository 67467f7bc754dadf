"""Which state the ranks of a new generation continue from."""

import errno
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.core.errors import LockstepError, RunError
from lockstep.report.events import EpochDone
from lockstep.training import elastic
from lockstep.training.checkpoint import Checkpoint, Progress
from lockstep.training.elastic import agree
from lockstep.training.resume_point import ResumePoint

IDENTITY = {"model": "lenet"}
FIRST, SECOND = "W0", "W1"
TASK = SimpleNamespace(initial={FIRST: None, SECOND: None}, state_units=("optimizer/W0", "optimizer/W1"))


def checkpoint(step, epoch=1, parts=(FIRST, SECOND), run=None):
    """A checkpoint of these parts of a model; every value in it is its step."""
    history = [EpochDone(number, 1.0, 1.0, 0.5) for number in range(1, epoch)]
    progress = Progress(step=step, epoch=epoch, history=history, first_loss=1.0)
    weights = {part: np.full(2, step, np.float32) for part in parts}
    units = {f"optimizer/{part}": {"momentum": np.full(2, step, np.float32)} for part in parts}
    return Checkpoint(run or IDENTITY, {}, progress, weights, {"units": units, "common": {"groups": [0.1]}})


def agreed(on_ranks, states, checkpoints=None):
    def agree_on(engine):
        (rank,) = engine.local_ranks
        start = ResumePoint(checkpoint=states[rank], checkpoints=checkpoints if rank == 0 else None)
        return agree(engine, start, IDENTITY, TASK)

    return on_ranks(len(states), agree_on)


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
        ([(4, [FIRST]), (4, [SECOND])], 4, 2),
        (
            [(5, [FIRST]), (4, [SECOND]), (4, [FIRST]), (4, [SECOND])],
            4,
            3,
        ),  # nobody has the second of step 5, nor a file
        ([(5, [FIRST]), (4, [SECOND]), (4, [FIRST]), (5, [SECOND])], 5, 2),
        ([(5, [FIRST, SECOND]), (4, [SECOND])], 5, 1),
        ([(5, [FIRST]), None, (5, [SECOND]), None], 5, 2),  # two ranks are new
    ],
)
def test_parts_of_the_model_are_merged_from_the_newest_step_of_which_all_are_there(
    on_ranks, held, newest, num_broadcasts
):
    states = [None if one is None else checkpoint(one[0], parts=one[1]) for one in held]
    found, sent = agreed(on_ranks, states)
    for state in found:
        assert state.progress.step == newest
        assert list(state.weights) == [FIRST, SECOND]
        assert sorted(state.states["units"]) == ["optimizer/W0", "optimizer/W1"]
        assert state.states["common"] == {"groups": [0.1]}
        assert all((array == newest).all() for array in state.weights.values())
        assert all((part["momentum"] == newest).all() for part in state.states["units"].values())
    assert sent == num_broadcasts


def test_weights_without_the_state_of_their_optimizer_are_not_enough(on_ranks):
    """With a shared update, every rank has all weights, and the state of some parameters only."""
    newer = checkpoint(5)
    newer.states["units"].pop("optimizer/W1")
    found, _ = agreed(on_ranks, [newer, checkpoint(4)])
    assert [one.progress.step for one in found] == [4, 4]


class Files:
    """The checkpoints in a run's folder."""

    def __init__(self, newest):
        self._newest = newest

    def newest(self, note, max_bytes):
        return self._newest and ("step-000002.safetensors", self._newest)


@pytest.mark.parametrize("in_file", [checkpoint(2), None], ids=["a checkpoint", "none"])
def test_a_part_that_was_lost_with_its_rank_is_in_the_newest_checkpoint_file(on_ranks, in_file, monkeypatch):
    monkeypatch.setattr(elastic, "max_bytes_of", lambda arrays: 1 << 20)
    found, _ = agreed(on_ranks, [checkpoint(5, parts=[FIRST]), None, checkpoint(5, parts=[FIRST])], Files(in_file))
    for one in found:
        assert one is None if in_file is None else (one.progress.step, list(one.weights)) == (2, [FIRST, SECOND])


@pytest.mark.parametrize(("in_file", "newest"), [(9, 9), (3, 4)])
def test_a_file_that_is_newer_than_the_newest_whole_state_is_taken(on_ranks, in_file, newest, monkeypatch):
    """A rank was lost with its part, and who replaces it has the state that the run was resumed from."""
    monkeypatch.setattr(elastic, "max_bytes_of", lambda arrays: 1 << 20)
    found, _ = agreed(on_ranks, [checkpoint(10, parts=[FIRST]), checkpoint(4)], Files(checkpoint(in_file)))
    assert [one.progress.step for one in found] == [newest] * 2


def test_a_folder_that_cannot_be_read_is_said_to_be(on_ranks, monkeypatch):
    class Unreadable:
        folder = "checkpoints"

        def newest(self, note, max_bytes):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(elastic, "max_bytes_of", lambda arrays: 1 << 20)
    with pytest.raises(RunError, match=r"checkpoints cannot be read: Input/output error\. Look for what fails"):
        agreed(on_ranks, [checkpoint(5, parts=[FIRST]), None], Unreadable())


def test_a_state_of_another_run_is_refused(on_ranks):
    states = [checkpoint(3), checkpoint(9, run={"model": "another"})]
    with pytest.raises(LockstepError, match="is of another run, or of other settings"):
        agreed(on_ranks, states)
