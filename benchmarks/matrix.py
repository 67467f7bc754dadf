"""The whole matrix of the first promise on fashion-mnist-mini: devices x exchanges x batch sizes, a hash for each size.

    python benchmarks/matrix.py
    python benchmarks/matrix.py --batch-sizes 256 --devices 1,2 --out /tmp/results

Runs `lockstep train --data fashion-mnist-mini --epochs 2` for K = 1 to 8 and cpu:0,cpu:1, the exchanges gather, sharded
and tree, and batch sizes 256, 100, 7 and 1. Takes about half an hour on two cores; tests/ has a part of it.
"""

import argparse
import sys
from pathlib import Path

from lockstep.bench.results import append_result, describe_run
from lockstep.config import RunConfig
from lockstep.training.run import run

RESULTS = Path(__file__).parent / "results"


def weights(devices: str, exchange: str, batch_size: int) -> str:
    """The hash of the weights at the end of a run."""
    config = RunConfig(
        data="fashion-mnist-mini", num_epochs=2, devices=devices, exchange=exchange, batch_size=batch_size
    )
    return run(config, quiet=True).weights_sha256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", default="256,100,7,1")
    parser.add_argument("--devices", default="1,2,3,4,5,6,7,8", help="numbers; cpu:0,cpu:1 is run too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    hashes: dict[str, str] = {}
    num_runs = 0
    for batch_size in arguments.batch_sizes.split(","):
        for exchange in ("sharded", "gather", "tree"):
            for devices in (*arguments.devices.split(","), "cpu:0,cpu:1"):
                found = weights(devices, exchange, int(batch_size))
                assert found == hashes.setdefault(batch_size, found), (devices, exchange, batch_size)
                num_runs += 1
        print(f"batch {batch_size}: {hashes[batch_size]} ({num_runs} runs so far)", flush=True)
    result = describe_run("python benchmarks/matrix.py", *sys.argv[1:]) | {"runs": num_runs, "weights_sha256": hashes}
    append_result(arguments.out / "matrix.jsonl", result)


if __name__ == "__main__":
    main()
