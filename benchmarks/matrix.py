"""The whole matrix of the first promise on fashion-mnist-mini: devices x exchanges x batch sizes, a hash for each size.

    python benchmarks/matrix.py

Runs `lockstep train --data fashion-mnist-mini --epochs 2` for K = 1 to 8 and cpu:0,cpu:1, the exchanges gather, sharded
and tree, and batch sizes 256, 100, 7 and 1. Takes about half an hour on two cores; tests/ holds a part of it.
"""

import json
import platform
from pathlib import Path

from lockstep.backends import load_backend
from lockstep.config import RunConfig
from lockstep.report.events import RunDone
from lockstep.training.run import run

RESULT = Path(__file__).parent / "results" / "matrix.json"


def weights(devices: int | str, exchange: str, batch_size: int) -> str:
    """The hash that the run ends with."""
    config = RunConfig(
        data="fashion-mnist-mini", num_epochs=2, devices=devices, exchange=exchange, batch_size=batch_size
    )
    last = run(config, quiet=True)
    assert isinstance(last, RunDone)
    return last.weights_sha256


def main() -> None:
    hashes: dict[int, str] = {}
    num_runs = 0
    for batch_size in (256, 100, 7, 1):
        for exchange in ("sharded", "gather", "tree"):
            for devices in (*range(1, 9), "cpu:0,cpu:1"):
                found = weights(devices, exchange, batch_size)
                assert found == hashes.setdefault(batch_size, found), (devices, exchange, batch_size)
                num_runs += 1
        print(f"batch {batch_size}: {hashes[batch_size]} ({num_runs} runs so far)", flush=True)
    backend = load_backend("torch")
    record = {
        "command": "python benchmarks/matrix.py",
        "machine": f"{backend.hardware()[-1].name}, {backend.hardware()[-1].num_cores} cores",
        "versions": {"python": platform.python_version(), "torch": backend.version()},
        "runs": num_runs,
        "weights_sha256": hashes,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
