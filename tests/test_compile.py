"""`--compile`: the model as code of its own, with bits of its own, the same for every number of devices."""

import shutil

import pytest
from torch import nn

import lockstep
from lockstep.errors import ConfigError

HOW = {"data": "fashion-mnist-mini", "num_epochs": 1, "lr": 0.2, "quiet": True, "compile": True}


@pytest.mark.filterwarnings("ignore")  # what a compiler says about itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_every_number_of_devices_gives_the_same_weights():
    results = [lockstep.train(**HOW, devices=k) for k in (1, 2)]
    plain = lockstep.train(**{**HOW, "compile": False}, devices=1)
    assert len({result.weights_sha256 for result in results}) == 1
    assert results[0].first_loss == pytest.approx(plain.first_loss, rel=1e-5)
    assert results[0].seconds_per_epoch < 10  # compiling is said apart


def test_what_cannot_be_compiled_is_refused_before_anything_starts():
    dropout = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))
    with pytest.raises(ConfigError, match=r"The model draws random numbers \(dropout\?\)"):
        lockstep.train(**HOW, model=dropout)
    with pytest.raises(ConfigError, match="cannot wait for statistics of the whole batch"):
        lockstep.train(**HOW, model=nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), batch_norm="sync")
    with pytest.raises(ConfigError, match="numpy does not compile a model"):
        lockstep.train(**HOW, backend="numpy")


def test_tf32_is_for_gpus():
    with pytest.raises(ConfigError, match="tf32 is a way of NVIDIA's GPUs"):
        lockstep.train(
            data="fashion-mnist-mini",
            model=nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
            precision="tf32",
            devices=1,
        )
