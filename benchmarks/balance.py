"""Two logical devices, one of them made half as fast: shards by measured time against equal numbers of shards.

    python benchmarks/balance.py                       # pairs of runs, interleaved, for 8, 16 and 32 shards
    python benchmarks/balance.py --pairs 1 --epochs 2 --shards 8 --out /tmp/results

The slow device sleeps as long as it computes. The weights must be the same. Appends to benchmarks/results/.
"""

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.bench.results import append_result, describe_run
from lockstep.bench.tables import spread
from lockstep.data import load_dataset
from lockstep.models.lenet_bn import LeNetBN

RESULTS = Path(__file__).parent / "results"


class HalfAsFast(nn.Module):
    """A model that takes twice the time on the second device."""

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
    parser.add_argument("--out", type=Path, default=RESULTS)
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
            times = f"equal {equal:.2f} s, measured {measured:.2f} s"
            print(f"{shards} shards: {times}, {equal / measured:.3f} times faster", flush=True)
        faster = spread([equal / measured for equal, measured in pairs])
        found[str(shards)] = {"times_faster": faster._asdict(), "pairs": pairs, "weights_sha256": first}
        print(
            f"{shards} shards: {faster.median:.2f} times faster "
            f"(median of {len(pairs)}, {faster.lowest:.2f} to {faster.highest:.2f})"
        )
    result = describe_run("python benchmarks/balance.py", *sys.argv[1:]) | {"shards": found}
    append_result(arguments.out / "balance.jsonl", result)


if __name__ == "__main__":
    main()
