"""Several ranks over NCCL, here on one GPU: the bits of one rank, captured and not, and what happens when one fails.

NCCL refuses two ranks on one GPU of one machine; with LOCKSTEP_NCCL_SHARED_GPU=1 each seems to be on a machine of its
own. Every program is a process of its own: one that has used a GPU cannot fork workers for it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
ENV = {**os.environ, "LOCKSTEP_NCCL_SHARED_GPU": "1"}

PROGRAM = """
import json, sys
import numpy as np
import torch
from torch import nn
import lockstep
from lockstep.models.gpt2 import GPT2, Size

def gpt2():
    return GPT2(512, 64, Size(width=128, num_heads=4, num_blocks=2), dropout=0.1)

def everything():
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 10)
    )

def tokens(largest, length, number=200):
    drawn = np.random.default_rng(0).integers(largest, size=(number, length + 1))
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()

mini = {"data": "fashion-mnist-mini", "num_epochs": 1, "lr": 0.05}
CASES = {
    "lenet": {**mini, "model": "lenet", "momentum": 0.9},
    "resnet18": {**mini, "model": "resnet18", "precision": "bf16"},
    "everything": {**mini, "model": everything, "optimizer": "adamw", "lr": 1e-3},
    "transformer": {"data": tokens(64, 48), "model": "transformer", "num_epochs": 2, "lr": 0.05, "batch_size": 64},
    "gpt2": {
        "data": tokens(512, 64), "model": gpt2, "num_epochs": 2, "lr": 1e-3, "batch_size": 64, "optimizer": "adamw",
        "precision": "bf16",
    },
}

if __name__ == "__main__":
    case, *runs = sys.argv[1:]
    for run in runs:
        engine, k, capture, exchange = run.split(":")
        result = lockstep.train(
            **CASES[case], engine=engine, devices=",".join(["cuda:0"] * int(k)), capture=capture == "captured",
            exchange=exchange, quiet=True, check_every=2, timeout=60,
        )
        losses = [done.train_loss for done in result.history]
        print(json.dumps([run, result.weights_sha256, result.buffers_sha256, losses]), flush=True)
"""


CASES = ["lenet", "resnet18", "everything", "transformer", "gpt2"]
MODES = [f"{k}:{how}:sharded" for k in (1, 2, 4) for how in ("captured", "eager")]
EXCHANGES = [f"processes:3:captured:{exchange}" for exchange in ("gather", "tree", "sharded", "ring", "native")]


@pytest.fixture
def runs_of(tmp_path):
    """The results of programs by their names. They run at the same time: mostly they import and wait."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    started = {}

    def start(name, case, runs):
        command = [sys.executable, str(path), case, *runs]
        with (tmp_path / f"{name}.out").open("w") as out, (tmp_path / f"{name}.err").open("w") as err:
            started[name] = subprocess.Popen(command, stdout=out, stderr=err, cwd=tmp_path, env=ENV)

    def results(name):
        assert started[name].wait(timeout=240) == 0, (tmp_path / f"{name}.err").read_text()
        return [json.loads(line) for line in (tmp_path / f"{name}.out").read_text().splitlines()]

    def run(**programs):
        for name, (case, *runs) in programs.items():
            start(name, case, runs)
        return [results(name) for name in programs]

    yield run
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("case", CASES)
def test_ranks_over_nccl_give_the_bits_of_one_process(runs_of, case):
    programs = {engine: [case, *(f"{engine}:{mode}" for mode in MODES)] for engine in ("inprocess", "processes")}
    found = [run for runs in runs_of(**programs) for run in runs]
    assert len(found) == 2 * len(MODES)
    assert len({json.dumps(result) for _, *result in found}) == 1, found


def test_all_exchanges_over_three_ranks(runs_of):
    alone, others = runs_of(alone=["lenet", "inprocess:1:captured:sharded"], others=["lenet", *EXCHANGES])
    ((_, weights, _, losses),) = alone
    assert {found[1] for found in others[:3]} == {weights}
    for _, _, _, found in others[3:]:  # they add in another order
        assert found == pytest.approx(losses, rel=1e-4)


def start(tmp_path, *more):
    arguments = ["--data", "fashion-mnist-mini", "--model", "lenet-bn", "--epochs", "40", "--engine", "processes"]
    arguments += ["--devices", "cuda:0,cuda:0", "--checkpoint-every", "2", "--out", "run", "--json", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=ENV, start_new_session=True,
    )  # fmt: skip


def workers_of(run, folder):
    limit = time.monotonic() + 120
    while not (folder.is_dir() and os.listdir(folder)):
        assert time.monotonic() < limit
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.01)
    return [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]


def test_a_killed_rank_is_replaced_and_the_run_goes_on(tmp_path):
    run = start(tmp_path)
    os.kill(workers_of(run, tmp_path / "run" / "checkpoints")[1], signal.SIGKILL)
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    assert "rank 1 (cuda:0) was killed by SIGKILL; a new worker takes its place" in err
    alone = [sys.executable, "-m", "lockstep", "train", "--data", "fashion-mnist-mini", "--model", "lenet-bn"]
    alone = subprocess.run(
        [*alone, "--epochs", "40", "--devices", "cuda:0", "--json"], capture_output=True, cwd=tmp_path
    )
    assert json.loads(out)["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]


def test_a_stopped_rank_is_named_within_the_deadline(tmp_path):
    run = start(tmp_path, "--timeout", "10")
    stopped = workers_of(run, tmp_path / "run" / "checkpoints")[1]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    try:
        _, err = run.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):  # it was ended with the run
            os.kill(stopped, signal.SIGCONT)
    assert time.monotonic() - began < 40
    assert run.returncode == 1
    assert "rank 1 (cuda:0) is in " in err
    assert "it is stopped (SIGSTOP)" in err or "it sends no heartbeat" in err


def test_an_exception_in_the_model_is_said_once(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Fails(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(784, 10)\n"
        "    def forward(self, X):\n"
        "        raise ValueError('no such thing')\n"
    )
    arguments = ["--data", "fashion-mnist-mini", "--model", "mine:Fails", "--engine", "processes"]
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", *arguments, "--devices", "cuda:0,cuda:0"],
        capture_output=True, text=True, cwd=tmp_path, env=ENV, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("Traceback") <= 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("lockstep: ")]
    assert "ValueError: no such thing (at " in said
