"""Splits of the network, of layers and of the update on a GPU: the bits of one device, in threads and in processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime import split_cases
from runtime.split_cases import CASES, IN_SLICES, WHOLE, trained

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
KINDS = pytest.mark.parametrize("splits", [WHOLE, IN_SLICES], ids=["whole", "slices"])


@KINDS
@pytest.mark.parametrize("case", CASES)
def test_one_hash_for_every_split(case, splits):
    alone = trained(case, **({"slices": 4} if splits is IN_SLICES else {}))
    for split, how in splits:
        assert trained(case, split, **how) == alone, split


@KINDS
@pytest.mark.parametrize(
    ("case", "nccl"), [("lenet", "0"), ("lenet", "1"), ("resnet18", "1"), ("transformer", "1")], ids=str
)
def test_ranks_may_be_processes(tmp_path, case, nccl, splits):
    """`LOCKSTEP_NCCL_SHARED_GPU` lets NCCL connect ranks on one GPU."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, split_cases.__file__, case, json.dumps(splits), "cuda:0"],
        capture_output=True, text=True, cwd=tmp_path, timeout=240,
        env={**os.environ, "LOCKSTEP_NCCL_SHARED_GPU": nccl, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [trained(case, **({"slices": 4} if splits is IN_SLICES else {}))] * len(splits)
