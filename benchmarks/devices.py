"""One device against k for the same run: interleaved pairs, medians, and the same weights.

    python benchmarks/devices.py                       # 1 against 2 logical devices, one epoch of Fashion-MNIST
    python benchmarks/devices.py --data fashion-mnist-mini --epochs 3

Absolute times mean little on a shared machine; the ratio within a pair does. The result goes to benchmarks/results/.
"""

import argparse
import json
import platform
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from lockstep.backends import load_backend
from lockstep.config import RunConfig
from lockstep.report.events import Result
from lockstep.training.run import run

RESULTS = Path(__file__).parent / "results"


def run_once(config: RunConfig) -> Result:
    """The result of a run without any reporting."""
    return run(config, quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2", help="the devices to compare with the first of them alone")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()

    first_alone = arguments.devices.partition(",")[0] if ":" in arguments.devices else 1
    many = RunConfig(data=arguments.data, num_epochs=arguments.epochs, devices=arguments.devices)
    one = replace(many, devices=first_alone)
    run_once(RunConfig(data="fashion-mnist-mini", num_epochs=1, devices=arguments.devices))  # warm up
    pairs = []
    for number in range(arguments.pairs):
        first, second = run_once(one), run_once(many)
        assert first.weights_sha256 == second.weights_sha256, "P1 is broken"
        pairs.append((first.seconds_per_epoch, second.seconds_per_epoch))
        print(f"pair {number + 1}: {pairs[-1][0]:.2f} s, {pairs[-1][1]:.2f} s, ratio {pairs[-1][1] / pairs[-1][0]:.3f}")

    backend = load_backend("torch")
    ratios = [b / a for a, b in pairs]
    result = {
        "command": " ".join(["python benchmarks/devices.py", *sys.argv[1:]]),
        "machine": [f"{h.name}, {h.num_cores} cores, {h.num_bytes / 2**30:.0f} GiB" for h in backend.hardware()],
        "versions": {"python": platform.python_version(), "torch": backend.version()},
        "devices": [first.devices, second.devices],
        "seconds_per_epoch": [statistics.median(times) for times in zip(*pairs, strict=True)],
        "ratio": {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)},
        "pairs": pairs,
        "weights_sha256": first.weights_sha256,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"devices-{len(second.devices)}-{Path(arguments.data).stem}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"{len(second.devices)} devices take {result['ratio']['median']:.3f} of the time of 1 "
        f"(median of {len(pairs)} pairs, {min(ratios):.3f} to {max(ratios):.3f}); same weights. {path}"
    )


if __name__ == "__main__":
    main()
