"""Steps in processes: what is measured in worker processes, and what the clock makes of it."""

import multiprocessing
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import lockstep
from lockstep.analysis.candidates import configurations
from lockstep.analysis.curves import curve_of
from lockstep.analysis.loading import Loading
from lockstep.analysis.process_costs import ProcessCosts
from lockstep.analysis.step_costs import Configuration, Hardware, predict
from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError, Interrupted
from lockstep.partition.grid import Grid
from lockstep.schedules.clock import Link

PARENT = os.getpid()
DATA = np.zeros((32, 8), np.float32), np.zeros(32, np.int64)


def seconds(profile, configuration):
    return predict(profile, configuration, Hardware()).seconds


class FailsInProcesses(nn.Linear):
    """A model that only fails where ranks are processes."""

    def forward(self, X):
        if os.getpid() != PARENT:
            raise RuntimeError("not here")
        return super().forward(X)


def small_plan(model, **more):
    settings = {"batch_size": 8, "shards": 4, "seconds": 0.1, "devices": "cpu:0,cpu:1", "lr": 0.1, "quiet": True}
    return lockstep.plan(2, model=model, data=DATA, engine="processes", **{**settings, **more})


def test_a_check_of_processes_runs_in_processes():
    found = small_plan(nn.Linear(8, 2), check=True, split="data", shards=2)
    assert [row.configuration.num_devices for row in found.rows] == [1, 2]
    assert all(row.measured_ms > 0 for row in found.rows)


def test_a_plan_for_processes_is_measured_in_processes():
    found = small_plan(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    profile = found.profile
    assert profile.engine == "processes"
    assert profile.link.latency > 0
    assert profile.cut_link.latency > 0
    assert profile.link.bandwidth < float("inf")
    assert profile.start > 0
    assert set(profile.together) == {2}
    assert [number for number, _ in profile.step.points] == [1, 2]
    assert {row.split for row in found.rows} == {"data", "network", "layers"}
    assert all(row.predicted_ms > 0 for row in found.rows)
    assert "engine='processes'" in found.recommended.command
    assert "engine processes" in found.title
    assert any("to start" in note for note in found.notes)


def test_a_model_that_fails_in_a_worker_process_is_named():
    with pytest.raises(ConfigError, match=r"cannot be measured: rank 0 .*RuntimeError: not here"):
        small_plan(FailsInProcesses(8, 2))


class InterruptsOnce(nn.Linear):
    """A model in whose first pass in a worker process the user ends the program."""

    def __init__(self):
        super().__init__(8, 2)
        self.is_done = multiprocessing.Value("b", 0)

    def forward(self, X):
        if os.getpid() != PARENT:
            with self.is_done.get_lock():
                if not self.is_done.value:
                    os.kill(PARENT, signal.SIGTERM)
                self.is_done.value = 1
        return super().forward(X)

    def __deepcopy__(self, memo):
        """Replicas are copies, and are interrupted together once."""
        copied = InterruptsOnce()
        copied.load_state_dict(self.state_dict())
        copied.is_done = self.is_done
        return copied


def test_an_interrupt_ends_the_processes():
    with pytest.raises(Interrupted):
        small_plan(InterruptsOnce(), seconds=60)


def test_what_processes_send_takes_time_and_activations_their_own(profile):
    data, network = Configuration(Grid(2), 8), Configuration(Grid(network=2), 8, ("layer2",))
    costs = ProcessCosts({2: profile.whole}, {1: 0.0, 2: 0.0}, Link(0.01, 1e6), Link(0.02, 1e6))
    with_processes = costs.applied_to(profile)
    assert seconds(with_processes, data) > 0.32 + 2 * 0.01  # two rounds of the exchange
    assert seconds(profile, data) == pytest.approx(0.32 * 1.1)  # threads, which slow each other down and send nothing
    slow_cuts = replace(with_processes, cut_link=Link(1.0, 1e6))
    assert seconds(slow_cuts, network) > seconds(with_processes, network) + 1
    assert seconds(slow_cuts, data) == seconds(with_processes, data)
    what_if = Hardware(link=Link(), is_shared=False)
    assert predict(slow_cuts, network, what_if).seconds == predict(profile, network, what_if).seconds


def test_layers_in_slices_are_those_that_processes_shared(profile):
    shared = curve_of([(1, 0.1), (1000, 100.0)])
    found = ProcessCosts({}, {1: 0.0}, shared=shared).applied_to(profile)
    assert found.sliced.shared == shared
    assert found.sliced.alone == profile.sliced.alone


def test_processes_exchange_buckets_while_others_are_computed(profile):
    large = replace(profile, num_entries=8_000_000, link=Link(1e-4, 1e9), engine="processes", together={})
    found, *_ = configurations(large, RunConfig(batch_size=64), [2], [8], Hardware())
    whole = found._replace(bucket_mb=0.0)
    assert found.bucket_mb > 0
    assert seconds(large, found) < seconds(large, whole)
    threads, *_ = configurations(replace(large, engine="inprocess"), RunConfig(batch_size=64), [2], [8], Hardware())
    assert threads.bucket_mb == 0


def test_processes_load_their_own_shards(profile):
    slow = replace(profile, loading=Loading(0.05), engine="processes", together={})
    assert seconds(slow, Configuration(Grid(1), 8)) == pytest.approx(0.64 + 64 * 0.05)
    assert seconds(slow, Configuration(Grid(2), 8)) == pytest.approx((0.64 + 64 * 0.05) / 2)
    stages = Configuration(Grid(network=2), 8, ("layer2",))
    assert seconds(slow, stages) > 64 * 0.05  # the first and the last one need all samples
