"""`on_step` and `on_epoch`: early stopping, and evaluation in mid-epoch, with the same bits for any devices."""

import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.core.errors import ConfigError, LockstepError
from lockstep.report.runlog import read_weights

DRAW = np.random.RandomState(0)
X, Y = DRAW.standard_normal((100, 6)).astype(np.float32), DRAW.randint(0, 3, 100)
X_TEST, Y_TEST = DRAW.standard_normal((37, 6)).astype(np.float32), DRAW.randint(0, 3, 37)
HOW = {
    "data": ((X, Y), (X_TEST, Y_TEST)),
    "batch_size": 32,
    "lr": 0.1,
    "quiet": True,
}  # 4 steps an epoch, the last of 4
RUNS = [(1, "inprocess"), (2, "inprocess"), (3, "inprocess"), (2, "processes")]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def settings_of(k, engine):
    return {"devices": k, "engine": engine, "model": net(), "shards": 4, "batch_norm": "sync", **HOW}


def test_a_run_that_is_stopped_after_an_epoch_has_the_bits_of_a_shorter_one():
    whole = lockstep.train(epochs=2, **settings_of(1, "inprocess"))
    for k, engine in RUNS:
        stopped = lockstep.train(
            epochs=9, on_epoch=lambda run: run.stop() if run.epoch == 2 else None, **settings_of(k, engine)
        )
        assert (stopped.weights_sha256, stopped.buffers_sha256) == (whole.weights_sha256, whole.buffers_sha256)
        assert [done.metrics for done in stopped.history] == [done.metrics for done in whole.history]


def test_a_run_that_is_stopped_in_mid_epoch_has_a_result_and_is_resumed_with_the_same_bits(tmp_path):
    whole = lockstep.train(epochs=3, **settings_of(1, "inprocess"))
    hashes = set()
    for number, (k, engine) in enumerate(RUNS):
        how = {**settings_of(k, engine), "epochs": 3, "out": tmp_path / f"run{number}"}
        stopped = lockstep.train(on_step=lambda run: run.stop() if run.step == 6 else None, **how)
        hashes.add(stopped.weights_sha256)
        assert stopped.steps == 6
        assert [done.epoch for done in stopped.history] == [1, 2]
        assert stopped.samples_per_second * stopped.seconds_per_epoch == pytest.approx(100)
        assert read_weights(how["out"], 1 << 20).keys() == stopped.module.state_dict().keys()
        assert (how["out"] / "checkpoints" / "step-000006.safetensors").exists()
        resumed = lockstep.train(resume=True, **how)
        assert resumed.weights_sha256 == whole.weights_sha256
        assert [done.train_loss for done in resumed.history] == [done.train_loss for done in whole.history]
    assert len(hashes) == 1


def test_the_loss_of_a_stopped_epoch_is_a_mean_over_the_samples_it_had():
    losses = []

    def on_step(run):
        losses.append(run.loss)
        if run.step == 2:
            run.stop()

    result = lockstep.train(epochs=1, on_step=on_step, **settings_of(2, "inprocess"))
    assert result.history[0].train_loss == pytest.approx(sum(losses) / 2)  # both had 32 samples
    assert losses[0] == result.first_loss


def test_what_a_callback_sees():
    seen = []

    def on_step(run):
        if run.step in (1, 6):
            batches = DataLoader(TensorDataset(torch.from_numpy(X_TEST), torch.from_numpy(Y_TEST)), batch_size=10)
            own, given = run.evaluate(), run.evaluate(batches)
            assert own["accuracy"] == given["accuracy"]
            assert own["loss"] == pytest.approx(given["loss"])
            seen.append((run.epoch, run.step, run.loss, own, run.weights()["0.weight"].tobytes()))

    def on_epoch(run):
        assert run.evaluate() == run.metrics
        seen.append((run.epoch, run.step, run.loss, run.metrics))

    how = {**settings_of(1, "inprocess"), "epochs": 2}
    result = lockstep.train(on_step=on_step, on_epoch=on_epoch, **how)
    first, seen = seen, []
    assert [(epoch, step) for epoch, step, *_ in first] == [(1, 1), (1, 4), (2, 6), (2, 8)]
    assert first[-1][2:] == (result.history[-1].train_loss, result.metrics)
    again = lockstep.train(on_step=on_step, on_epoch=on_epoch, **{**how, "devices": 3})
    assert seen == first
    plain = lockstep.train(**how)
    assert result.weights_sha256 == again.weights_sha256 == plain.weights_sha256, "to look changes nothing"


def test_one_process_calls_them(tmp_path):
    def on_epoch(run):
        with (tmp_path / "calls").open("a") as file:
            file.write(f"{os.getpid()} {run.epoch} {run.evaluate()['loss']:.6f}\n")

    result = lockstep.train(epochs=2, on_epoch=on_epoch, **settings_of(2, "processes"))
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [(epoch, loss) for _, epoch, loss in calls] == [
        (str(done.epoch), f"{done.metrics['loss']:.6f}") for done in result.history
    ]
    assert len({pid for pid, _, _ in calls}) == 1


@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_one_that_fails_ends_the_run_with_its_line(engine):
    def on_step(run):
        raise ValueError("lost")

    with pytest.raises(LockstepError, match=r"on_step failed after step 1: ValueError: lost \(at .*test_callbacks"):
        lockstep.train(epochs=2, on_step=on_step, **settings_of(2, engine))


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="on_epoch is a int"):
        lockstep.train(on_epoch=3, **settings_of(1, "inprocess"))


def test_they_work_for_the_texts_lenet_in_any_framework():
    steps = []

    def on_step(run):
        steps.append(run.step)
        if run.step == 3:
            run.stop()

    how = {"data": "fashion-mnist-mini", "backend": "numpy", "lr": 0.1, "quiet": True, "epochs": 1}
    results = [lockstep.train(k, on_step=on_step, **how) for k in (1, 2)]
    assert steps == [1, 2, 3] * 2
    assert results[0].weights_sha256 == results[1].weights_sha256


def test_early_stopping_by_the_loss_is_the_same_for_any_devices():
    def run(k):
        best = [np.inf, 0]

        def on_epoch(run):
            best[:] = [run.metrics["loss"], run.epoch] if run.metrics["loss"] < best[0] else best
            if run.epoch - best[1] >= 2:
                run.stop()

        result = lockstep.train(epochs=60, on_epoch=on_epoch, **{**settings_of(k, "inprocess"), "lr": 1.0})
        return len(result.history), result.weights_sha256

    first, *others = [run(k) for k in (1, 2, 3)]
    assert others == [first, first]
    assert first[0] < 60
