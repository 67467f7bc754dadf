"""Processes on a GPU: NCCL where every rank has a GPU of its own, through the CPU's memory where two share one.

Every run is a command of its own: a process that has used a GPU cannot start workers for one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]


def command(*arguments):
    base = [sys.executable, "-m", "lockstep", "train", "--data", "fashion-mnist-mini", "--epochs", "2", "--json"]
    return [*base, *map(str, arguments)]


def trained(*arguments, cwd):
    done = subprocess.run(command(*arguments), capture_output=True, text=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MODELS = {
    "lenet": ("--model", "lenet", "--momentum", 0.9),
    "lenet-bn": ("--model", "lenet-bn", "--optimizer", "adamw"),
    "bf16": ("--model", "lenet-bn", "--precision", "bf16"),
    "sync": ("--model", "lenet-bn", "--batch-norm", "sync"),
}


@pytest.mark.parametrize("case", MODELS)
def test_processes_on_one_gpu_give_the_bits_of_one_thread(tmp_path, case):
    in_processes = [("--devices", ",".join(["cuda:0"] * k), "--engine", "processes") for k in (1, 2, 3)]
    with ThreadPoolExecutor() as pool:  # most of their time they import and wait
        runs = [("--devices", "cuda:0"), *in_processes]
        alone, *results = pool.map(lambda run: trained(*run, *MODELS[case], cwd=tmp_path), runs)
    for result in results:
        assert result["weights_sha256"] == alone["weights_sha256"]
        assert result["buffers_sha256"] == alone["buffers_sha256"]
        assert result["history"][-1]["metrics"] == alone["history"][-1]["metrics"]


def test_the_frameworks_own_all_reduce_runs_on_nccl_with_one_rank(tmp_path):
    alone = trained("--devices", "cuda:0", cwd=tmp_path)
    native = trained("--devices", "cuda:0", "--engine", "processes", "--exchange", "native", cwd=tmp_path)
    assert abs(native["history"][-1]["train_loss"] - alone["history"][-1]["train_loss"]) < 1e-5


def test_torchrun_gives_the_same_bits_on_a_gpu(tmp_path):
    alone = trained("--devices", "cuda:0", cwd=tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    done = subprocess.run([*launcher, *command()[2:]], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["devices"] == ["cuda:0"]
    assert result["weights_sha256"] == alone["weights_sha256"]


def wait_until(is_so, run):
    limit = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < limit
        assert run.poll() is None
        time.sleep(0.01)


def test_a_worker_that_is_killed_is_replaced_and_a_killed_run_goes_on(tmp_path):
    alone = trained("--devices", "cuda:0", "--model", "lenet-bn", "--epochs", 60, cwd=tmp_path)
    how = ("--model", "lenet-bn", "--epochs", 60, "--checkpoint-every", 2, "--out", "run", "--resume")
    with (tmp_path / "err").open("w") as err:
        run = subprocess.Popen(
            command(*how, "--devices", "cuda:0,cuda:0", "--engine", "processes"),
            stdout=subprocess.DEVNULL, stderr=err, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
    folder = tmp_path / "run" / "checkpoints"
    wait_until(lambda: folder.is_dir() and os.listdir(folder), run)
    workers = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(workers[1]), signal.SIGKILL)
    said = "rank 1 (cuda:0) was killed by SIGKILL; a new worker takes its place"
    wait_until(lambda: said in (tmp_path / "err").read_text(), run)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    again = trained(*how, "--devices", "cuda:0", cwd=tmp_path)
    assert again["weights_sha256"] == alone["weights_sha256"]
    assert again["buffers_sha256"] == alone["buffers_sha256"]


def test_a_replica_that_has_drifted_is_found_without_moving_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, torch\n"
        "class Flips(torch.optim.SGD):\n"
        "    num = 0\n"
        "    def __init__(self, params):\n"
        "        super().__init__(params, lr=0.1)\n"
        "        self.num_steps = 0\n"
        "    def step(self):\n"
        "        super().step()\n"
        "        self.num_steps += 1\n"
        "        if self.num_steps == 5 and not os.path.exists('flipped'):\n"
        "            open('flipped', 'w').close()\n"
        "            self.param_groups[0]['params'][2].data.view(-1).view(torch.int32)[0] ^= 1\n"
    )
    how = ("--model", "lenet-bn", "--optimizer", "mine:Flips", "--check-every", 1, "--devices", "cuda:0,cuda:0,cuda:0")
    found = subprocess.run(command(*how), capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert found.returncode == 1
    assert re.search(
        r"lockstep: step 5: a replica is not equal to the others any more: rank \d \(cuda:0\)", found.stderr
    )
