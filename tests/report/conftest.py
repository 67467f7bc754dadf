"""The events of a small run, made by hand."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from lockstep.config import RunConfig
from lockstep.report.events import EpochDone, Result, RunStarted, RunStopped

CONFIG = asdict(RunConfig(data="fashion-mnist-mini", num_epochs=2))


@pytest.fixture
def make_started():
    """A run that starts, with these settings changed."""

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
    """The result of a run of two epochs, with these values changed."""

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
    """A run that stops, after so many finished epochs."""

    def make(num_epochs: int) -> RunStopped:
        done = make_result()
        return RunStopped(
            epoch=num_epochs + 1,
            step=8 * num_epochs + 3,
            reason="the loss is NaN or infinite",
            history=done.history[:num_epochs],
            weights=done.params if num_epochs else {},
        )

    return make
