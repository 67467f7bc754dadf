"""An interrupt keeps what was trained: the error carries the result so far, of both engines."""

import os
import signal
import traceback

import pytest

import lockstep
from lockstep.core.layout import sha256_of

SETTINGS = {"data": "fashion-mnist-mini", "batch_size": 250, "quiet": True}


@pytest.fixture(autouse=True)
def not_ignored():
    """SIGINT is ignored in commands that run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_the_result_so_far_has_the_epochs_and_the_weights(engine):
    starter = os.getpid()

    def interrupt(run):
        if run.epoch == 2:
            os.kill(starter, signal.SIGINT)

    with pytest.raises(lockstep.Interrupted) as stopped:
        lockstep.train(2, **SETTINGS, epochs=400, on_epoch=interrupt, engine=engine)
    assert str(stopped.value).endswith("`except lockstep.Interrupted as stopped: result = stopped.result`.")
    assert len(traceback.extract_tb(stopped.value.__traceback__)) == 2  # this test, and `train`
    result = stopped.value.result
    whole = lockstep.train(1, **SETTINGS, epochs=2)
    assert [done.train_loss for done in result.history[:2]] == [done.train_loss for done in whole.history]
    assert result.steps >= whole.steps
    assert sha256_of(list(result.params.values())) == result.weights_sha256
    assert set(result.params) == set(whole.params)
    assert "test accuracy" in repr(result)


@pytest.mark.parametrize("how", [{"slices": 4}, {"split": "layers", "slices": 4}, {"split": "network"}], ids=str)
def test_where_the_model_is_split_the_result_so_far_has_whole_parameters(how):
    def interrupt(run):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(lockstep.Interrupted) as stopped:
        lockstep.train(2, **SETTINGS, epochs=1, on_step=interrupt, **how)
    whole = lockstep.train(1, **SETTINGS, epochs=1)
    shapes = {name: array.shape for name, array in whole.params.items()}
    assert {name: array.shape for name, array in stopped.value.result.params.items()} == shapes


def test_before_the_first_epoch_there_are_weights_and_no_history():
    def interrupt(run):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(lockstep.Interrupted) as stopped:
        lockstep.train(1, **SETTINGS, epochs=1, on_step=interrupt)
    result = stopped.value.result
    assert (result.history, result.test_accuracy) == ([], None)
    assert 1 <= result.steps <= 2
    assert result.lines().startswith(f"{result.steps} steps, ")
    assert result._repr_html_().startswith("<table>")


@pytest.mark.parametrize("split", ["layers=2", "network=2", "data=2"])
def test_the_result_of_a_split_model_is_whole(split):
    """A layer in slices, too."""

    def interrupt(run):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(lockstep.Interrupted) as stopped:
        lockstep.train(model="mlp", **SETTINGS, slices=4, split=split, on_step=interrupt)
    result = stopped.value.result
    assert sha256_of(list(result.params.values())) == result.weights_sha256
    assert not [name for name in result.params if "[" in name]
