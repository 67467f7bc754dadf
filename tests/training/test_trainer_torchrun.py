"""A trainer under torchrun: processes that do not do the same are told so, in a sentence."""

import subprocess
import sys

import pytest

HEAD = """
import os, torch, lockstep
from torch import nn
rank = int(os.environ["RANK"])
torch.manual_seed({seed})
X, y = torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64)
trainer = lockstep.Trainer(nn.Linear(4, 2), lr=0.1, timeout=30)
"""
CASES = {
    "save on one rank": (
        "0",
        "trainer.step((X, y))\nif rank == 0: trainer.save('saved')\nelse: trainer.evaluate((X, y))",
        "All processes must make the same calls in the same order",
    ),
    "another seed": (
        "rank",
        "trainer.step((X, y))",
        "The model of rank 1 has other initial weights than that of rank 0",
    ),
    "an error on one rank": (
        "0",
        """
import pathlib, time
here = pathlib.Path(f"rank {rank} has its trainer")
here.touch()
while not rank and not pathlib.Path("rank 1 has its trainer").exists():  # or it would fail before it has one
    time.sleep(0.1)
for _ in range(2):
    try:
        trainer.step((X[: 16 if rank else 15], y))
    except lockstep.LockstepError as problem:
        print(rank, problem, flush=True)
""",
        "1 The trainer is closed, because step failed on this rank. Make another one.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_that_differ_are_told_so(tmp_path, case):
    seed, body, sentence = CASES[case]
    (tmp_path / "program.py").write_text(HEAD.replace("{seed}", seed) + body)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
    done = subprocess.run(start, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert sentence in said
    for confusing in ("TypeError", "unhashable", "GLHF", "AttributeError"):
        assert confusing not in said


FOREIGN = """
import os
os.environ["LOCKSTEP_SECRET_FILE"] = f"secret-{os.environ['RANK']}"
with open(os.open(os.environ["LOCKSTEP_SECRET_FILE"], os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
    file.write(os.environ["RANK"] * 32)
"""


def test_a_process_without_the_secret_is_refused(tmp_path):
    body = "trainer.step((X, y))\nprint('trained', flush=True)"
    (tmp_path / "program.py").write_text(FOREIGN + HEAD.replace("{seed}", "0") + body)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
    done = subprocess.run(start, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode != 0
    assert "trained" not in done.stdout
    assert "does not belong to this run. On several machines, all need the same secret" in done.stderr
