"""The events of a small run, made by hand."""

from typing import Any

import numpy as np
import pytest

from lockstep.report.events import EpochDone, Result, RunStarted, RunStopped

CONFIG = {
    "model": "lenet",
    "data": "fashion-mnist-mini",
    "batch_size": 256,
    "learning_rate": 0.2,
    "num_epochs": 2,
    "num_shards": 8,
    "backend": "torch",
    "exchange": "sharded",
}


@pytest.fixture
def make_started():
    """A run that begins, with other settings if need be."""

    def make(keeps_bits: bool = True, **settings: Any) -> RunStarted:
        return RunStarted(
            config={**CONFIG, **settings},
            data_sha256="cd" * 32,
            backend_version="2.13.0",
            devices=["cpu:0", "cpu:1"],
            num_train_samples=2000,
            num_test_samples=500,
            num_parameters=63070,
            steps_per_epoch=8,
            keeps_bits=keeps_bits,
        )

    return make


@pytest.fixture
def make_result():
    """The result of a run of two epochs, with other values if need be."""

    def make(**values: Any) -> Result:
        good = {
            "test_accuracy": 0.8437,
            "seconds_per_epoch": 12.34,
            "samples_per_second": 162.1,
            "backend": "torch",
            "backend_version": "2.13.0",
            "devices": ["cpu:0", "cpu:1"],
            "steps": 16,
            "first_loss": 2.3026,
            "weights_sha256": "ab" * 32,
            "history": [EpochDone(1, 12.0, 1.5, 0.7), EpochDone(2, 12.68, 0.5, 0.8437)],
            "run": None,
            "params": {"W1": np.arange(6, dtype=np.float32).reshape(2, 3), "b1": np.array([-0.0, 1e-40], np.float32)},
        }
        return Result(**{**good, **values})

    return make


@pytest.fixture
def make_stopped(make_result):
    """A run that cannot go on, after so many finished epochs."""

    def make(num_epochs: int) -> RunStopped:
        done = make_result()
        return RunStopped(
            epoch=num_epochs + 1,
            step=8 * num_epochs + 3,
            reason="the loss is no longer a number",
            history=done.history[:num_epochs],
            weights=done.params if num_epochs else {},
        )

    return make
