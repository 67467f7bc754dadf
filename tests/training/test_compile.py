"""`--compile`: other bits, but the same for every number of devices."""

import json
import shutil
import subprocess
import sys

import pytest
from torch import nn

import lockstep
from lockstep.core.errors import ConfigError

HOW = {"data": "fashion-mnist-mini", "num_epochs": 1, "lr": 0.2, "quiet": True, "compile": True}


PROGRAM = """
import json
import lockstep

how = {"data": "fashion-mnist-mini", "num_epochs": 1, "lr": 0.2, "quiet": True}
results = [lockstep.train(**how, devices=k, compile=compiles) for k, compiles in ((1, True), (2, True), (1, False))]
print(json.dumps([[result.weights_sha256, result.first_loss, result.seconds_per_epoch] for result in results]))
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_every_number_of_devices_gives_the_same_weights():
    """In a process of its own: a compiler leaves threads behind."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    one, two, plain = json.loads(done.stdout)
    assert one[:2] == two[:2]
    assert one[1] == pytest.approx(plain[1], rel=1e-5)
    assert two[2] < 60  # without the time of compilation


BLOCKS_WITH_DROPOUT = """
import json
import numpy as np
import torch._dynamo.utils
import lockstep
from lockstep.models.gpt2 import GPT2, Size

tokens = np.random.default_rng(0).integers(64, size=(48, 17))
data = tokens[:, :-1].copy(), tokens[:, 1:].copy()
small = Size(width=32, num_heads=2, num_blocks=5)
how = {"data": data, "num_epochs": 2, "batch_size": 16, "lr": 1e-3, "optimizer": "adamw", "quiet": True}
results = [
    lockstep.train(model=lambda: GPT2(64, 16, small, dropout), **how, devices=k, compile=True).weights_sha256
    for dropout, k in ((0.2, 1), (0.2, 2), (0.2, 4), (0.0, 1))
]
print(json.dumps([results, torch._dynamo.utils.counters["stats"]["unique_graphs"]]))
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_dropout_is_keyed_by_the_shard_and_blocks_that_repeat_are_compiled_once():
    done = subprocess.run([sys.executable, "-c", BLOCKS_WITH_DROPOUT], capture_output=True, text=True, check=True)
    (one, two, four, without), num_graphs = json.loads(done.stdout)
    assert one == two == four != without
    assert num_graphs <= 4  # the block and the loss, with dropout and without; not five blocks


def test_models_that_cannot_be_compiled_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="cannot wait for statistics of the whole batch"):
        lockstep.train(**HOW, model=nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), batch_norm="sync")
    with pytest.raises(ConfigError, match="numpy does not compile a model"):
        lockstep.train(**HOW, backend="numpy")


def test_tf32_is_for_gpus():
    with pytest.raises(ConfigError, match="tf32 is an arithmetic of NVIDIA GPUs"):
        lockstep.train(
            data="fashion-mnist-mini",
            model=nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
            precision="tf32",
            devices=1,
        )
