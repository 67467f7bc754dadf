"""The time of every framework against the first one, on the same run: interleaved rounds, medians.

    make test                                  # makes the environments, once
    .venv/torch/bin/python benchmarks/frameworks.py
    .venv/torch/bin/python benchmarks/frameworks.py --backends torch,jax --rounds 1 --epochs 2 --out /tmp/results

Each run is a process of its own in the framework's environment. The first epoch is left out: it includes compilation,
where there is any. Appends to benchmarks/results/frameworks.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.bench.results import append_result, describe_run
from lockstep.bench.tables import spread

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def lockstep(backend: str, command: str, *arguments: str) -> dict[str, Any]:
    """What `lockstep COMMAND --json` prints in the environment of `backend`."""
    program = [str(ROOT / ".venv" / backend / "bin" / "lockstep"), command, "--backend", backend, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*program, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="torch,paddle,mxnet,jax,numpy")
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--data", default="fashion-mnist-mini")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    backends = arguments.backends.split(",")

    times: dict[tuple[str, str], list[float]] = {(b, k): [] for b in backends for k in arguments.devices.split(",")}
    hashes: dict[str, set[str]] = {backend: set() for backend in backends}
    first_losses: dict[str, float] = {}
    for number in range(arguments.rounds):
        for backend, k in times:
            options = ["--devices", k, "--data", arguments.data, "--epochs", str(arguments.epochs)]
            answer = lockstep(backend, "train", *options)
            times[backend, k].append(median(epoch["seconds"] for epoch in answer["history"][1:]))
            hashes[backend].add(answer["weights_sha256"])
            first_losses[backend] = answer["first_loss"]
            print(f"round {number + 1}, {backend} on {k}: {times[backend, k][-1]:.2f} s an epoch", flush=True)
    assert all(len(found) == 1 for found in hashes.values()), "P1 is broken"

    versions = {backend: lockstep(backend, "devices")["version"] for backend in backends}
    rows = []
    for (backend, k), seconds in times.items():
        ratio = spread([own / first for own, first in zip(seconds, times[backends[0], k], strict=True)])
        rows.append(
            {
                "backend": backend,
                "version": versions[backend],
                "num_devices": int(k),
                "seconds_per_epoch": median(seconds),
                "ratio": ratio._asdict(),
                "rounds": seconds,
                "first_loss": first_losses[backend],
                "weights_sha256": next(iter(hashes[backend])),
            }
        )
        print(
            f"{backend:7} on {k}: {median(seconds):.2f} s an epoch, "
            f"{ratio.median:.2f} times {backends[0]} ({ratio.lowest:.2f} to {ratio.highest:.2f})"
        )
    result = describe_run("python benchmarks/frameworks.py", *sys.argv[1:]) | {"rows": rows}
    append_result(arguments.out / "frameworks.jsonl", result)


if __name__ == "__main__":
    main()
