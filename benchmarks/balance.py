"""Two logical devices, one of them made half as fast: shards by measured time against equal shares.

    python benchmarks/balance.py                       # pairs of runs, interleaved, for 8, 16 and 32 shards

The slow device waits as long as it works. The weights must be the same. The result goes to benchmarks/results/.
"""

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.backends import load_backend
from lockstep.data import load_dataset
from lockstep.models.lenet_bn import LeNetBN

RESULTS = Path(__file__).parent / "results"


class HalfAsFast(nn.Module):
    """A model for which the second device takes twice the time: it waits as long as forward and backward take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = LeNetBN()

    def forward(self, X: torch.Tensor) -> Any:
        began = time.perf_counter()
        output = self.net(X)
        if threading.current_thread().name == "lockstep-rank-1":
            time.sleep(3 * (time.perf_counter() - began))  # backward takes twice as long as forward
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shards", default="8,16,32")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    data = load_dataset("fashion-mnist-mini")
    X, y = data.X_train, data.y_train

    def seconds(balance: str, shards: int) -> tuple[float, str]:
        result = lockstep.train(
            model=HalfAsFast(), data=(X, y), devices="cpu:0,cpu:1", shards=shards, balance=balance, lr=0.01,
            batch_size=256, epochs=arguments.epochs, quiet=True,
        )  # fmt: skip
        return sum(epoch.seconds for epoch in result.history), result.weights_sha256

    seconds("equal", 8)  # warm up
    found = {}
    for shards in map(int, arguments.shards.split(",")):
        pairs = []
        for _ in range(arguments.pairs):
            (equal, first), (measured, second) = seconds("equal", shards), seconds("measured", shards)
            assert first == second, "P1 is broken"
            pairs.append((equal, measured))
            print(
                f"{shards} shards: equal {equal:.2f} s, measured {measured:.2f} s, {equal / measured:.3f} times faster"
            )
        faster = [equal / measured for equal, measured in pairs]
        found[shards] = {
            "times_faster": {"median": statistics.median(faster), "lowest": min(faster), "highest": max(faster)},
            "pairs": pairs,
            "weights_sha256": first,
        }
    backend = load_backend("torch")
    result = {
        "command": " ".join(["python benchmarks/balance.py", *sys.argv[1:]]),
        "machine": [f"{h.name}, {h.num_cores} cores, {h.num_bytes / 2**30:.0f} GiB" for h in backend.hardware()],
        "versions": {"python": platform.python_version(), "torch": backend.version()},
        "shards": found,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "balance.json").write_text(json.dumps(result, indent=2) + "\n")
    for shards, entry in found.items():
        median, lowest, highest = entry["times_faster"].values()
        spread = f"median of {len(entry['pairs'])}, {lowest:.2f} to {highest:.2f}"
        print(f"{shards} shards: {median:.2f} times faster ({spread})")


if __name__ == "__main__":
    main()
