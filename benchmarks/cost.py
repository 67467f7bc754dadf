"""What a step costs, in time and memory, as devices, shards, batch and model grow.

    python benchmarks/cost.py                          # an MLP on fashion-mnist-mini, 3 rounds, interleaved
    python benchmarks/cost.py --quick --out /tmp/results

Every run is a process of its own, so that its peak memory is its own. Appends to benchmarks/results/.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.bench.results import append_result, describe_run

RESULTS = Path(__file__).parent / "results"
DEFAULTS = {"devices": 2, "shards": 8, "batch": 256, "width": 256}
VALUES = {
    "devices": [1, 2, 3, 4, 6, 8],
    "shards": [1, 2, 4, 8, 16, 32, 64],
    "batch": [64, 128, 256, 512, 1024],
    "width": [64, 256, 1024, 2048],
}
EPOCHS = 4  # of which the first is left out


def measure(settings: dict[str, int]) -> None:
    """One run in this process; prints its figures."""
    from torch import nn

    import lockstep

    def make() -> nn.Module:
        width = settings["width"]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    result = lockstep.train(
        model=make, data="fashion-mnist-mini", devices=min(settings["devices"], settings["shards"]), quiet=True,
        shards=settings["shards"], batch_size=settings["batch"], lr=0.01, epochs=EPOCHS, check_every=0,
    )  # fmt: skip
    figures = {
        "ms_a_step": 1e3 * median(epoch.seconds for epoch in result.history[1:]) / (result.steps / EPOCHS),
        "peak_mb": result.peak_memory["cpu"] / 1e6,
        "weights_sha256": result.weights_sha256,
    }
    print(json.dumps(figures))


def run(settings: dict[str, int]) -> dict[str, Any]:
    """The figures of a run in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(settings)]
    figures: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round with the first two values of everything")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(json.loads(arguments.one))
        return
    all_values = {name: values[:2] for name, values in VALUES.items()} if arguments.quick else VALUES
    figures: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(1 if arguments.quick else arguments.rounds):
        for name, values in all_values.items():
            for value in values:
                found = run({**DEFAULTS, name: value})
                figures.setdefault((name, value), []).append(found)
                numbers = f"{found['ms_a_step']:.2f} ms, {found['peak_mb']:.0f} MB"
                print(f"round {number + 1}, {name} {value}: {numbers}", flush=True)
    hashes = {run["weights_sha256"] for (name, _), runs in figures.items() if name == "devices" for run in runs}
    assert len(hashes) == 1, "P1 is broken"
    tables = {
        name: [
            {
                name: value,
                "ms_a_step": median(found["ms_a_step"] for found in figures[name, value]),
                "peak_mb": median(found["peak_mb"] for found in figures[name, value]),
                "rounds": figures[name, value],
            }
            for value in values
        ]
        for name, values in all_values.items()
    }
    result = describe_run("python benchmarks/cost.py", *sys.argv[1:]) | {"usual": DEFAULTS, "tables": tables}
    append_result(arguments.out / "cost.jsonl", result)
    for name, rows in tables.items():
        others = ", ".join(f"{other} {value}" for other, value in DEFAULTS.items() if other != name)
        print(f"\n{name} ({others})")
        for row in rows:
            print(f"  {row[name]:>5}  {row['ms_a_step']:8.2f} ms a step  {row['peak_mb']:6.0f} MB")


if __name__ == "__main__":
    main()
