"""What a step costs, in time and memory, as devices, shards, batch and model grow.

    python benchmarks/cost.py                          # an MLP on fashion-mnist-mini, 3 rounds, interleaved

Every run is a process of its own, so that its peak memory is its own. The result goes to benchmarks/results/.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from lockstep.backends import load_backend

RESULTS = Path(__file__).parent / "results"
USUAL = {"devices": 2, "shards": 8, "batch": 256, "width": 256}
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
    steps = result.steps / EPOCHS
    print(
        json.dumps(
            {
                "ms_a_step": 1e3 * statistics.median(done.seconds for done in result.history[1:]) / steps,
                "peak_mb": result.peak_memory["cpu"] / 1e6,
                "weights_sha256": result.weights_sha256,
            }
        )
    )


def run(settings: dict[str, int]) -> dict[str, Any]:
    """The figures of a run in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(settings)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(json.loads(arguments.one))
        return
    figures: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(arguments.rounds):
        for name, values in VALUES.items():
            for value in values:
                found = run({**USUAL, name: value})
                figures.setdefault((name, value), []).append(found)
                print(f"round {number + 1}, {name} {value}: {found['ms_a_step']:.2f} ms, {found['peak_mb']:.0f} MB")
    hashes = {
        found["weights_sha256"] for (name, _), of_value in figures.items() if name == "devices" for found in of_value
    }
    assert len(hashes) == 1, "P1 is broken"
    tables = {
        name: [
            {
                name: value,
                "ms_a_step": statistics.median(found["ms_a_step"] for found in figures[name, value]),
                "peak_mb": statistics.median(found["peak_mb"] for found in figures[name, value]),
                "rounds": figures[name, value],
            }
            for value in values
        ]
        for name, values in VALUES.items()
    }
    backend = load_backend("torch")
    result = {
        "command": " ".join(["python benchmarks/cost.py", *sys.argv[1:]]),
        "machine": [f"{h.name}, {h.num_cores} cores, {h.num_bytes / 2**30:.0f} GiB" for h in backend.hardware()],
        "versions": {"python": platform.python_version(), "torch": backend.version()},
        "usual": USUAL,
        "tables": tables,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cost.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, rows in tables.items():
        others = ", ".join(f"{other} {value}" for other, value in USUAL.items() if other != name)
        print(f"\n{name} ({others})")
        for row in rows:
            print(f"  {row[name]:>5}  {row['ms_a_step']:8.2f} ms a step  {row['peak_mb']:6.0f} MB")


if __name__ == "__main__":
    main()
