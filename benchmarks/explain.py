"""Where the time of a step goes, for runs as they are and runs that are slow on purpose: does `explain` find out why?

    python benchmarks/explain.py                       # all cases, on two idle cores (about three minutes)
    python benchmarks/explain.py --cases lenet-1,lenet-2
    python benchmarks/explain.py --quick --out /tmp/results

lenet-1, lenet-2   the text's network on one device and on two
resnet18           the text's next one, on two
slow-loader        every sample takes 2 ms to load
slow-rank          rank 1 sleeps 10 ms in every forward pass
tiny-shards        a batch of 64 in 32 shards
few-shards         a network in two stages, with two shards: a bubble
(A slow link needs two network namespaces: tests/runtime/test_machines.py.)

For each: the waterfall, whether its parts add up to the step, how large the rest is, and whether the largest part is
the one that the run was made slow by. Appends to benchmarks/results/.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lockstep
from lockstep.bench.results import append_result, describe_run

RESULTS = Path(__file__).parent / "results"


class Sleeping(nn.Module):
    """A layer that sleeps in its forward pass: on one rank, or for every sample."""

    def __init__(self, seconds: float, only: str = "", of_a_sample: bool = False) -> None:
        super().__init__()
        self.linear, self.seconds, self.only, self.of_a_sample = nn.Linear(64, 64), seconds, only, of_a_sample

    def forward(self, X: torch.Tensor) -> Any:
        if self.only in threading.current_thread().name:
            time.sleep(self.seconds * (len(X) if self.of_a_sample else 1))
        return self.linear(X)


class SlowSamples(torch.utils.data.Dataset[Any]):
    """Samples that take a while to load."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, number: int) -> Any:
        time.sleep(0.002)
        return torch.full((64,), number / 256), torch.zeros(64)


def numbers(num_samples: int = 512) -> Any:
    """Inputs, which are their own targets."""
    X = np.random.default_rng(0).standard_normal((num_samples, 64)).astype("float32")
    return X, X


def images(num_samples: int) -> Any:
    """Images with labels that mean nothing."""
    X = np.random.default_rng(0).standard_normal((num_samples, 1, 28, 28)).astype("float32")
    return X, np.arange(num_samples) % 10


def cases(is_quick: bool) -> dict[str, tuple[Callable[[], dict[str, Any]], str]]:
    """By name: the settings of a run, and the part that it was made slow by."""
    epochs, own = (2 if is_quick else 4), {"loss": "mse", "lr": 1e-3, "batch_size": 64, "devices": 2}
    lenet = {"data": "fashion-mnist-mini", "epochs": epochs}
    two_stages = nn.Sequential(Sleeping(2e-4, of_a_sample=True), Sleeping(2e-4, of_a_sample=True))
    return {
        "lenet-1": (lambda: {**lenet, "devices": 1}, ""),
        "lenet-2": (lambda: {**lenet, "devices": 2}, ""),
        "resnet18": (
            lambda: {"model": "resnet18", "data": images(128 if is_quick else 512), "batch_size": 64, "lr": 0.01,
                     "devices": 2, "epochs": 1},
            "",
        ),
        "slow-loader": (lambda: {**own, "model": nn.Linear(64, 64), "data": SlowSamples(), "workers": 0}, "loading"),
        "slow-rank": (
            lambda: {**own, "model": Sleeping(0.01, "lockstep-rank-1"), "data": numbers()},
            "waiting for the slower rank",
        ),
        "tiny-shards": (lambda: {**own, "model": "lenet", "loss": "cross_entropy", "lr": 0.1, "shards": 32,
                                 "data": "fashion-mnist-mini"}, "smaller shards"),
        "few-shards": (
            lambda: {**own, "model": two_stages, "data": numbers(), "split": "network", "stages": "1", "shards": 2},
            "bubble",
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="")
    parser.add_argument("--quick", action="store_true", help="few steps: only to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    known = cases(arguments.quick)
    result = describe_run("python benchmarks/explain.py", *sys.argv[1:])
    for name in arguments.cases.split(",") if arguments.cases else known:
        settings, culprit = known[name]
        run = lockstep.train(**{"epochs": 2, "quiet": True, "trace": True, "checkpoint_every": 0, **settings()})
        found = lockstep.explain(run)
        largest = max(found.parts, key=lambda part: found.parts[part])
        total = found.perfect_ms + sum(found.parts.values()) + found.rest_ms
        print(f"{name}:\n{found}")
        print(f"  sum {total:.2f} of {found.step_ms:.2f} ms, rest {100 * found.rest_ms / found.step_ms:.2f} %", end="")
        print(f"; largest: {largest}{', as it should be' if largest == culprit else ''}\n", flush=True)
        assert not culprit or largest == culprit, f"it was made slow by {culprit}"
        result[name] = found.summary() | {"culprit": culprit, "largest": largest}
    append_result(arguments.out / "explain.jsonl", result)


if __name__ == "__main__":
    main()
