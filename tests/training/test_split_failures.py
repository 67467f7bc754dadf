"""Drift, healing, hangs and values that are not finite, where ranks hold parts of the model."""

import itertools
import os
import threading

import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import LockstepError, PeerFailure, RankTimeout
from lockstep.core.this_thread import THIS_THREAD
from lockstep.replicas.part_replica import PartModuleReplica
from lockstep.runtime.process_transport import ProcessTransport
from lockstep.schedules.instructions import PARAMETERS
from training.split_models import IMAGES, VECTORS, seeded, sequential

HOW = {"batch_size": 10, "shards": 6, "epochs": 3, "quiet": True, "verify_every": 0, "checkpoint_every": 0}


def trained(**settings):
    how = {"model": seeded(sequential), "data": (IMAGES, IMAGES), "momentum": 0.9, "lr": 0.05, **HOW, **settings}
    return lockstep.train(**how)


@pytest.fixture
def failing_rank(monkeypatch):
    """The first rank with the second stage to begin step 5 has a bit that is wrong."""
    begin_step, lock, flipped = PartModuleReplica.begin_step, threading.Lock(), []

    def flip(self, step):
        begin_step(self, step)
        with lock:
            if step == 5 and self._part.stages == (1,) and not flipped:
                flipped.append(True)
                weight = next(param for param in self.module.parameters() if param.dim() > 1)
                weight.data.view(torch.int32)[(0,) * weight.dim()] ^= 1 << 16

    monkeypatch.setattr(PartModuleReplica, "begin_step", flip)
    return flipped


def test_of_three_replicas_of_a_stage_the_one_that_differs_is_named(failing_rank):
    with pytest.raises(LockstepError) as found:
        trained(split="data=3,network=2", check_every=2)
    assert failing_rank
    assert str(found.value).startswith("step 6: a replica is not equal to the others any more: rank ")
    assert any(f"rank {rank} (cpu:{rank}), first in " in str(found.value) for rank in (1, 3, 5))


def test_a_stage_heals_and_the_bits_are_those_of_a_healthy_run(failing_rank):
    healed = trained(split="data=3,network=2", check_every=2, heal=True)
    assert failing_rank
    healthy = trained(devices=1)
    assert healed.weights_sha256 == healthy.weights_sha256
    assert healed.buffers_sha256 == healthy.buffers_sha256
    assert [done.train_loss for done in healed.history] == [done.train_loss for done in healthy.history]


class Waits(nn.Module):
    """Hangs in one of its calls."""

    done, calls = threading.Event(), itertools.count()

    def forward(self, X):
        if X.requires_grad and next(Waits.calls) == 4:
            Waits.done.wait(20)
        return X


def test_a_stage_that_hangs_is_named():
    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), Waits(), nn.Linear(8, 3))

    try:
        with pytest.raises(RankTimeout, match=r"rank 1 \(cpu:1\) is in forward and backward of step 1"):
            trained(model=seeded(make), data=VECTORS, split="network=2", stages="2", timeout=3)
    finally:
        Waits.done.set()
        for thread in threading.enumerate():
            if thread.name.startswith("lockstep"):
                thread.join(30)


class WaitsInTraining(nn.Module):
    """Hangs on the second rank, in the fifth step."""

    done, calls = threading.Event(), itertools.count(1)

    def forward(self, X):
        if self.training and THIS_THREAD.rank == 1 and next(WaitsInTraining.calls) == 14:
            WaitsInTraining.done.wait(20)
        return X


@pytest.mark.parametrize("bucket_mb", [0, 0.0002])
def test_a_rank_that_hangs_while_others_wait_for_its_statistics_is_named(bucket_mb):
    WaitsInTraining.done, WaitsInTraining.calls = threading.Event(), itertools.count(1)
    how = {"batch_norm": "sync", "devices": 2, "engine": "inprocess", "timeout": 2, "bucket_mb": bucket_mb}
    net = nn.Sequential(nn.Linear(6, 16), WaitsInTraining(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    try:
        with pytest.raises(RankTimeout, match=r"rank 1 \(cpu:1\) is in forward and backward of step"):
            trained(model=net, data=VECTORS, **how)
    finally:
        WaitsInTraining.done.set()
        for thread in threading.enumerate():
            if thread.name.startswith("lockstep"):
                thread.join(30)


@pytest.mark.parametrize("split", ["network=2", "layers=2", "data=2"])
def test_a_loss_that_is_not_finite_stops_every_split(split):
    update = {"update": "sharded"} if split == "data=2" else {}
    with pytest.raises(LockstepError, match="finite") as found:
        trained(split=split, lr=1e30, **update)
    assert found.value.exit_status == 1


@pytest.mark.parametrize("split", ["network=2", "data=2,network=2", "layers=2"])
def test_that_steps_are_not_verified_is_said(split, capsys):
    """Those of one device are, which changes no bit."""
    slices = {"slices": 4} if "layers" in split else {}
    expected = trained(devices=1, **slices)
    note = "Steps are not verified (--verify-every) where the model or its update is split."
    found = trained(split=split, verify_every=2, quiet=False, **slices)
    assert found.weights_sha256 == expected.weights_sha256
    assert note in " ".join(capsys.readouterr().err.split())
    trained(split=split, verify_every=400, quiet=False, **slices)
    assert note not in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("saves", [True, False])
def test_connections_that_break_while_new_parameters_are_handed_out_change_no_bit(saves, tmp_path, monkeypatch):
    """Some parameters of a rank are then of the new step, and others of the old one."""
    finish = ProcessTransport.finish

    def fail_once(self, key):
        broken = tmp_path / f"broken-{os.getpid()}"  # processes are forked: each breaks once
        if key.channel == PARAMETERS and self._position.step == 5 and not broken.exists():
            broken.touch()
            self._group.close()
            raise PeerFailure("connection reset")
        return finish(self, key)

    monkeypatch.setattr(ProcessTransport, "finish", fail_once)
    how = {"update": "sharded", "devices": 2, "engine": "processes"}
    found = trained(**how, out=str(tmp_path / "run"), checkpoint_every=2 if saves else 100)
    assert len(list(tmp_path.glob("broken-*"))) == 2
    monkeypatch.undo()
    assert found.weights_sha256 == trained(devices=1).weights_sha256
