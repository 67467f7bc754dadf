"""A loop of the user's, callbacks and verification on a GPU: the bits of `train`, captured and not."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.core.errors import LockstepError
from lockstep.data.order import sample_order

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
DRAW = np.random.RandomState(0)
X, Y = DRAW.standard_normal((128, 6)).astype(np.float32), DRAW.randint(0, 3, 128)
HOW = {"optimizer": "adamw", "lr": 0.01}
DEVICES = ["cuda:0", "cuda:0,cuda:0", "cuda:0,cuda:0,cuda:0"]
EPOCHS = 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def batches(num_epochs=EPOCHS):
    """As `train` makes them."""
    for epoch in range(num_epochs):
        for part in torch.from_numpy(sample_order(0, epoch, len(X))).split(32):
            yield torch.from_numpy(X)[part], torch.from_numpy(Y)[part]


def train(**how):
    how = {"devices": "cuda:0", "data": (X, Y), "batch_size": 32, "epochs": EPOCHS, "quiet": True, **HOW, **how}
    return lockstep.train(model=how.pop("model", net()), **how)


@pytest.mark.parametrize("settings", [{}, {"capture": False}, {"verify_every": 2}, {"batch_norm": "sync"}], ids=str)
@pytest.mark.parametrize("devices", DEVICES)
def test_a_loop_has_the_bits_of_train(devices, settings):
    expected = train(**({"batch_norm": "sync"} if "batch_norm" in settings else {})).weights_sha256
    assert train(devices=devices, **settings).weights_sha256 == expected
    with lockstep.Trainer(net(), devices=devices, **HOW, **settings) as trainer:
        losses = [trainer.step(batch).loss for batch in batches()]
        found = trainer.evaluate(DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=50))
        assert trainer.weights_sha256 == expected
    assert np.isfinite(losses).all()
    assert set(found) == {"loss", "accuracy"}


def test_batches_may_be_on_the_gpu_already():
    with lockstep.Trainer(net(), devices="cuda:0,cuda:0", **HOW) as trainer:
        for inputs, labels in batches():
            trainer.step((inputs.cuda(), labels.cuda()))
        assert trainer.weights_sha256 == train().weights_sha256


@pytest.mark.parametrize("devices", DEVICES[:2])
def test_gradients_update_save_and_load(devices, tmp_path):
    expected = train().weights_sha256
    every = list(batches())
    with lockstep.Trainer(net(), devices=devices, **HOW) as trainer:
        for batch in every[:5]:
            trainer.gradients(batch)
            trainer.update()
        trainer.save(tmp_path / "saved")
    with lockstep.Trainer.load(tmp_path / "saved", model=net(), devices=DEVICES[1]) as trainer:
        for batch in every[5:]:
            trainer.step(batch)
        assert trainer.weights_sha256 == expected


@pytest.mark.parametrize("devices", DEVICES[:2])
def test_a_run_that_a_callback_stops_has_the_bits_of_a_shorter_one(devices):
    steps = []
    stopped = train(
        devices=devices,
        epochs=9,
        on_step=lambda run: steps.append((run.step, run.loss)),
        on_epoch=lambda run: run.stop() if run.epoch == EPOCHS else None,
    )
    assert stopped.weights_sha256 == train().weights_sha256
    assert [step for step, _ in steps] == list(range(1, 13))


class Counts(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kept = nn.Linear(6, 3), {"calls": 0}

    def forward(self, inputs):
        self.kept["calls"] += 1
        return self.layer(inputs) * (1 + 0.001 * self.kept["calls"])


@pytest.mark.parametrize("settings", [{}, {"capture": False}], ids=str)
def test_a_state_that_shards_hand_on_is_named(settings):
    with pytest.raises(LockstepError, match=r"while a shard is computed, the model's kept\.calls"):
        train(model=Counts(), **settings)


PROGRAM = """
import json, sys, torch, lockstep
from test_cuda import HOW, batches, net
with lockstep.Trainer(net(), devices="cuda:0,cuda:0", **HOW) as trainer:
    for batch in batches():
        trainer.step(batch)
    print(json.dumps(trainer.weights_sha256), flush=True)
"""


def test_a_loop_under_torchrun_whose_ranks_share_a_secret(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    here = os.path.dirname(__file__)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "LOCKSTEP_NCCL_SHARED_GPU": "1", "PYTHONPATH": path}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
    done = subprocess.run(start, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    hashes = {json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')}
    assert hashes == {train().weights_sha256}
