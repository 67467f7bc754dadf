"""A run takes no more memory in its hundredth step than in its thirtieth, however the work is split."""

import json
import subprocess
import sys

import pytest

NUM_STEPS, NUM_WARM, MAX_MB = 130, 30, 20  # what one step has in its layers, kept for a hundred steps, is 150 MB
PROGRAM = """
import json, re, sys
import torch
from torch import nn
import lockstep

settings, rss = json.loads(sys.argv[1]), {}
torch.manual_seed(0)
if settings["model"] == "module":
    layers = [nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 4)]
    settings["model"] = nn.Sequential(*layers)
    data = torch.randn(640, 256), torch.randint(4, (640,))
else:
    data = torch.rand(640, 1, 28, 28), torch.randint(10, (640,))

def on_step(state):
    if state.step in (NUM_WARM, NUM_STEPS):
        status = open("/proc/self/status").read()
        rss[state.step] = int(re.search(r"VmRSS:\\s+(\\d+)", status)[1]) / 1024

lockstep.train(data=(data, data), batch_size=64, epochs=NUM_STEPS // 10, shards=4, quiet=True, checkpoint_every=0,
               lr=0.01, on_step=on_step, **settings)
print(json.dumps(rss))
"""
CASES = {
    "data": {"devices": 2, "model": "module"},
    "data, whole batch": {"devices": 2, "model": "module", "batch_norm": "sync"},
    "network": {"devices": 2, "model": "module", "split": "network"},
    "layers": {"devices": 2, "model": "module", "split": "layers", "slices": 2},
    "both, sharded": {"devices": 4, "model": "module", "split": "data=2,network=2", "update": "sharded"},
    "lenet": {"devices": 2, "model": "lenet", "split": "network", "slices": 2},
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", CASES)
def test_memory_does_not_grow_with_the_steps(tmp_path, case):
    program = PROGRAM.replace("NUM_STEPS", str(NUM_STEPS)).replace("NUM_WARM", str(NUM_WARM))
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(CASES[case])], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    early, late = json.loads(done.stdout.splitlines()[-1]).values()
    assert late - early < MAX_MB
