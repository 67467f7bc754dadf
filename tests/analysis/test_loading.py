"""Samples that are loaded one by one: what a step waits for, and that a plan knows it."""

import time

import pytest
import torch
from torch import nn

import lockstep
from lockstep.analysis.loading import Loading, Remembered
from lockstep.core.errors import ConfigError

NAP = 0.02  # seconds of a sample: longer than all else that the tiny model does
SHARDS = [4] * 8


class Slow(torch.utils.data.Dataset):
    """Every sample takes a while to load."""

    def __init__(self, broken=None):
        self.broken = broken

    def __len__(self):
        return 48

    def __getitem__(self, number):
        if number == self.broken:
            raise OSError("no such file")
        time.sleep(NAP)
        return torch.full((8,), number / 48), torch.zeros(8)


def slow_plan(workers, data=None, **more):
    settings = {"model": nn.Linear(8, 8), "loss": "mse", "batch_size": 8, "seconds": 0.1, "split": "data"}
    return lockstep.plan(2, data=data or Slow(), shards=4, workers=workers, quiet=True, **settings, **more)


def test_samples_that_are_loaded_ahead_are_not_waited_for():
    fast, slow = Loading(0.01, num_workers=2, ahead=4), Loading(0.1, num_workers=2, ahead=4)
    assert fast.waits(SHARDS, 1, step=0.5) == 0
    assert slow.waits(SHARDS, 1, step=0.5) == pytest.approx(32 * 0.1 / 2 - 0.5)


def test_what_is_not_loaded_ahead_is_waited_for():
    few = Loading(0.1, num_workers=1, ahead=4)  # of eight shards
    assert few.waits(SHARDS, 1, step=100.0) == pytest.approx(4 * 4 * 0.1)


def test_without_workers_all_is_waited_for():
    assert Loading(0.1).waits(SHARDS, 1, step=100.0) == pytest.approx(32 * 0.1)


def test_the_workers_are_shared_by_processes():
    loading = Loading(0.1, num_workers=4, ahead=4)
    assert loading.waits(SHARDS[:4], 2, step=0.0) == pytest.approx(16 * 0.1 / 2)
    assert loading.waits(SHARDS[:1], 8, step=0.0) == pytest.approx(4 * 0.1)  # one worker at least


def test_a_shard_takes_time_to_hand_over_even_if_it_is_there():
    assert Loading(1e-6, 0, 0.01, num_workers=2, ahead=4).waits(SHARDS, 1, step=1.0) == pytest.approx(0.08)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_sleeps_limits_every_configuration(workers):
    found = slow_plan(workers)
    assert {row.limited_by for row in found.rows} == {"loading"}
    assert found.profile.loading.seconds > 0.8 * NAP
    assert found.profile.loading.busy < found.profile.loading.seconds
    assert all(row.predicted_ms > 0.8e3 * 8 * NAP for row in found.rows)
    assert found.recommended.configuration.num_devices == 1
    assert any("--workers" in note for note in found.notes)


def test_a_check_counts_no_sample_that_was_loaded_during_anothers_turn():
    found = slow_plan(1, check=True)
    assert all(row.measured_ms > 0.8e3 * 8 * NAP for row in found.rows)


def test_passes_are_measured_with_samples_that_are_loaded_once():
    data = Remembered([1.0, 2.0])
    assert [data[1], data[1], len(data)] == [2.0, 2.0, 2]


def test_a_sample_that_cannot_be_loaded_is_named():
    with pytest.raises(ConfigError, match=r"cannot be measured: Sample \d+ of the training data"):
        slow_plan(0, Slow(broken=0), sampler=lambda epoch: [0] * 48)
