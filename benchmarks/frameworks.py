"""The cost of every framework against the first one, on the same work: interleaved rounds, medians.

    make test                                  # makes the environments, once
    .venv/torch/bin/python benchmarks/frameworks.py

Each run is a process of its own in the framework's environment. The first epoch is left out: it has the compilation in
it, where there is one. The result goes to benchmarks/results/frameworks.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run_once(backend: str, devices: int, data: str, epochs: int) -> dict[str, Any]:
    """The answer of `lockstep train` in the environment of `backend`."""
    lockstep = ROOT / ".venv" / backend / "bin" / "lockstep"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(lockstep), "train", "--backend", backend, "--devices", str(devices), "--data", data]
        done = subprocess.run(
            [*command, "--epochs", str(epochs), "--json"], cwd=folder, capture_output=True, text=True, check=True
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    answer["seconds"] = statistics.median(entry["seconds"] for entry in answer["history"][1:])
    return answer


def environment(backend: str) -> dict[str, Any]:
    """What `lockstep devices` says in the environment of `backend`."""
    lockstep = ROOT / ".venv" / backend / "bin" / "lockstep"
    done = subprocess.run(
        [str(lockstep), "devices", "--backend", backend, "--json"], capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="torch,paddle,mxnet,jax,numpy")
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--data", default="fashion-mnist-mini")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    backends = arguments.backends.split(",")
    counts = [int(count) for count in arguments.devices.split(",")]

    times: dict[tuple[str, int], list[float]] = {(b, k): [] for b in backends for k in counts}
    hashes: dict[str, set[str]] = {backend: set() for backend in backends}
    first_losses: dict[str, float] = {}
    for number in range(arguments.rounds):
        for backend, k in times:
            answer = run_once(backend, k, arguments.data, arguments.epochs)
            times[backend, k].append(answer["seconds"])
            hashes[backend].add(answer["weights_sha256"])
            first_losses[backend] = answer["first_loss"]
            print(f"round {number + 1}, {backend} on {k}: {answer['seconds']:.2f} s an epoch", flush=True)
    assert all(len(found) == 1 for found in hashes.values()), "P1 is broken"

    found = {backend: environment(backend) for backend in backends}
    rows = []
    for (backend, k), seconds in times.items():
        ratios = [own / first for own, first in zip(seconds, times[backends[0], k], strict=True)]
        rows.append(
            {
                "backend": backend,
                "version": found[backend]["version"],
                "num_devices": k,
                "seconds_per_epoch": statistics.median(seconds),
                "ratio": {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)},
                "rounds": seconds,
                "first_loss": first_losses[backend],
                "weights_sha256": next(iter(hashes[backend])),
            }
        )
        print(
            f"{backend:7} on {k}: {rows[-1]['seconds_per_epoch']:.2f} s an epoch, "
            f"{statistics.median(ratios):.2f} times {backends[0]} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    result = {
        "command": " ".join(["python benchmarks/frameworks.py", *sys.argv[1:]]),
        "machine": [
            f"{entry['name']}, {entry['num_cores']} cores, {entry['num_bytes'] / 2**30:.0f} GiB"
            for entry in found[backends[0]]["devices"]
        ],
        "rows": rows,
    }
    path = ROOT / "benchmarks" / "results" / "frameworks.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
