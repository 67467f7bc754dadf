"""One device against k for the same run: interleaved pairs, medians, and the same weights.

    python benchmarks/devices.py                       # 1 against 2 logical devices, one epoch of Fashion-MNIST
    python benchmarks/devices.py --data fashion-mnist-mini --epochs 3

Absolute times mean little on a shared machine; the ratio within a pair does. Appends to benchmarks/results/.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from lockstep.bench.results import append_result, describe_run
from lockstep.bench.tables import spread
from lockstep.config import RunConfig
from lockstep.training.run import run

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2", help="the devices to compare with the first of them alone")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    first_alone = arguments.devices.partition(",")[0] if ":" in arguments.devices else 1
    many = RunConfig(data=arguments.data, num_epochs=arguments.epochs, devices=arguments.devices)
    one = replace(many, devices=first_alone)
    run(RunConfig(data="fashion-mnist-mini", num_epochs=1, devices=arguments.devices), quiet=True)  # warm up
    pairs = []
    for number in range(arguments.pairs):
        first, second = run(one, quiet=True), run(many, quiet=True)
        assert first.weights_sha256 == second.weights_sha256, "P1 is broken"
        pairs.append((first.seconds_per_epoch, second.seconds_per_epoch))
        times = f"{pairs[-1][0]:.2f} s, {pairs[-1][1]:.2f} s"
        print(f"pair {number + 1}: {times}, ratio {pairs[-1][1] / pairs[-1][0]:.3f}", flush=True)

    ratio = spread([b / a for a, b in pairs])
    result = describe_run("python benchmarks/devices.py", *sys.argv[1:]) | {
        "devices": [first.devices, second.devices],
        "seconds_per_epoch": [median(times) for times in zip(*pairs, strict=True)],
        "ratio": ratio._asdict(),
        "pairs": pairs,
        "weights_sha256": first.weights_sha256,
    }
    path = arguments.out / f"devices-{len(second.devices)}-{Path(arguments.data).stem}.jsonl"
    append_result(path, result)
    print(
        f"{len(second.devices)} devices take {ratio.median:.3f} of the time of 1 "
        f"(median of {len(pairs)} pairs, {ratio.lowest:.3f} to {ratio.highest:.3f}); same weights. {path}"
    )


if __name__ == "__main__":
    main()
