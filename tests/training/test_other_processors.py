"""Processors with other vector units round differently: it is noticed, and `--portable` makes them equal."""

import json
import os
import subprocess
import sys

import pytest
import torch

from lockstep.core.errors import BackendError
from lockstep.training.run import run as run_in_this_process

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason="this processor has no AVX-512, which the others differ in")
LENET = ["--data", "fashion-mnist-mini", "--lr", "0.05", "--batch-size", "500"]


def train(*arguments, variables=None, status=0, launcher=()):
    environment = {**os.environ, **(variables or {})}
    command = [sys.executable, *launcher, "-m", "lockstep", "train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == status, done.stderr
    return done


def sha256_in(folder):
    return json.loads((folder / "result.json").read_text())["weights_sha256"]


@needs_avx512
def test_a_run_that_continues_on_another_processor_says_so_and_so_does_its_result(tmp_path):
    how = [*LENET, "--devices", 2, "--out", tmp_path / "run"]
    train(*how, "--epochs", 1)
    made_with = json.loads((tmp_path / "run" / "config.json").read_text())["made_with"]
    assert made_with["CPU capability"] == "AVX512"
    again = train(*how, "--epochs", 2, "--resume", variables=AVX2)
    notes = json.loads((tmp_path / "run" / "result.json").read_text())["notes"]
    what = "The checkpoint was made with another CPU capability, AVX512, and this is AVX2"
    sentence = f"{what}: from now on the bits may differ."
    assert sentence in notes
    assert sentence in again.stderr
    back = train(*how, "--epochs", 3, "--resume")
    assert "another CPU capability, AVX2, and this is AVX512" in back.stderr
    assert sentence in json.loads((tmp_path / "run" / "result.json").read_text())["notes"], "it stays in the result"


def test_a_run_that_continues_where_it_was_says_nothing(tmp_path):
    how = [*LENET, "--devices", 1, "--out", tmp_path / "run"]
    train(*how, "--epochs", 1)
    assert "bits may differ" not in train(*how, "--epochs", 2, "--resume").stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["notes"] == []


DIFFERING = f"""
import os
if os.environ["RANK"] == "1":
    os.environ.update({AVX2!r})
"""
TRAIN = 'import lockstep; lockstep.train(data="fashion-mnist-mini", batch_size=500, num_epochs=1, quiet=True)'
LOOP = """
import torch, lockstep
with lockstep.Trainer(torch.nn.Linear(4, 2), lr=0.1) as trainer:
    trainer.step((torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64)))
"""


@needs_avx512
@pytest.mark.parametrize("program", [TRAIN, LOOP], ids=["train", "Trainer"])
def test_ranks_with_different_processors_are_refused_with_the_variables_to_set(tmp_path, program):
    (tmp_path / "program.py").write_text(DIFFERING + program)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*start, tmp_path / "program.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode != 0
    assert (
        "Rank 1 (cpu:1) has another CPU capability than rank 0: AVX2 and AVX512. They round differently" in done.stderr
    )
    assert "set ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 for all of them" in done.stderr


NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.mix = nn.TransformerEncoderLayer(28 * 8, 4, 64, dropout=0.1, batch_first=True)
        self.score = nn.Linear(28 * 8, 10)

    def forward(self, X):
        Y = self.norm(self.conv(X)).relu().permute(0, 2, 1, 3).flatten(2)
        return self.score(self.mix(Y).mean(1))
"""


@needs_avx512
@pytest.mark.parametrize("model", ["lenet", "mlp", "net:Net"])
def test_portable_kernels_give_one_hash_under_every_setting(tmp_path, monkeypatch, model):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    settings = [{}, AVX2, {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}]
    how = [*LENET, "--epochs", 1, "--model", model]
    for number, variables in enumerate(settings):
        train(*how, "--portable", "--devices", number % 2 + 1, "--out", f"portable{number}", variables=variables)
    train(*how, "--out", "own")
    hashes = {sha256_in(tmp_path / f"portable{number}") for number in range(3)}
    assert len(hashes) == 1
    assert hashes != {sha256_in(tmp_path / "own")}, "the processor's own kernels round differently"


@needs_avx512
def test_kernels_that_were_chosen_already_cannot_be_made_portable():
    from lockstep.config import RunConfig

    torch.ones(3) + 1
    before = dict(os.environ)
    with pytest.raises(BackendError, match="Start your program with ATEN_CPU_CAPABILITY=avx2"):
        run_in_this_process(RunConfig(data="fashion-mnist-mini", portable=True), quiet=True)
    assert dict(os.environ) == before


def test_other_frameworks_have_no_portable_kernels():
    done = train(*LENET, "--backend", "numpy", "--portable", status=2)
    assert "Lockstep cannot choose the kernels of numpy" in done.stderr
