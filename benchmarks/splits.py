"""What the ways of splitting a step cost, and bring: interleaved rounds, medians, and the same weights.

    python benchmarks/splits.py                        # all four parts, on two idle cores (about ten minutes)
    python benchmarks/splits.py --parts idle,update --rounds 3
    python benchmarks/splits.py --quick --out /tmp/results

idle      the share of a step in which the devices of a pipeline wait (two equal stages, 8 shards, 1f1b and gpipe), from
          traces, against (P-1)/(S+P-1)
network   ResNet-18 in 16 shards: one device, and two by network split; time, and memory a device
update    AdamW on four devices: every device updates everything, or what it owns; time, and optimizer state a device
layers    a wide MLP in 8 slices: one device, and two by layer split; and what slices cost on one device

Absolute times mean little on a shared machine; ratios within a round do. Appends to benchmarks/results/.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from torch import nn

import lockstep
from lockstep.bench.results import append_result, describe_run
from lockstep.bench.tables import spread
from lockstep.core.tracing import SpanName
from lockstep.models.resnet18 import ResNet18
from lockstep.report.events import Result

RESULTS = Path(__file__).parent / "results"
Ways = dict[str, dict[str, Any]]  # name -> settings; ratios are to the first
UNCHECKED = {"check_every": 0, "verify_every": 0, "quiet": True, "checkpoint_every": 0}
PASSES = (SpanName.FORWARD, SpanName.BACKWARD, SpanName.COMPUTE, SpanName.DATA)  # spans that are no waiting


def mlp(width: int, num_layers: int) -> Callable[[], nn.Module]:
    """Makes an MLP of equal layers."""

    def make() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.ReLU())))

    return make


def numbers(num_samples: int, *shape: int) -> Any:
    """Inputs that mean nothing."""
    return np.random.default_rng(0).standard_normal((num_samples, *shape)).astype("float32")


def compare(ways: Ways, num_rounds: int, same_weights: bool = True, **common: Any) -> dict[str, Any]:
    """Every way once a round, one after the other: milliseconds a step, ratios within a round, memory a device."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, Result] = {}
    for number in range(num_rounds):
        for name, settings in ways.items():
            result = results[name] = lockstep.train(**UNCHECKED, **common, **settings)
            seconds = [epoch.seconds for epoch in result.history[1:]]  # the first loads kernels
            times[name].append(1e3 * median(seconds) * common["epochs"] / result.steps)
        print(
            f"  round {number + 1}: " + ", ".join(f"{name} {ms[-1]:.1f} ms" for name, ms in times.items()), flush=True
        )
    hashes = {result.weights_sha256 for result in results.values()}
    assert len(hashes) == 1 or not same_weights, "P1 is broken"
    first, *others = ways
    ratios = {name: spread([b / a for a, b in zip(times[first], times[name], strict=True)]) for name in others}
    for name, ratio in ratios.items():
        print(f"  {name} takes {ratio.median:.3f} of the time of {first} ({ratio.lowest:.3f} to {ratio.highest:.3f})")
    memory = {name: result.device_memory for name, result in results.items()}
    return {"ms_a_step": times, "ratios": {n: r._asdict() for n, r in ratios.items()}, "device_memory": memory}


def largest(memory: list[dict[str, int]], *kinds: str) -> int:
    """The bytes of these kinds on the device that has most of them."""
    return max(sum(device[kind] for kind in kinds or device) for device in memory)


def traced_idle(settings: dict[str, Any]) -> dict[str, float]:
    """The idle share of a traced run, the median of its steps; and the work of its busiest device in that of all."""
    with tempfile.TemporaryDirectory() as folder:
        lockstep.train(**UNCHECKED, **settings, trace=True, out=Path(folder) / "run")
        found = json.loads((Path(folder) / "run" / "trace.json").read_text())
        events = [event for event in found if event["ph"] == "X" and event["name"] in PASSES]
    shares, heaviest = [], []
    for step in sorted({event["args"]["step"] for event in events})[2:]:
        spans = [event for event in events if event["args"]["step"] == step]
        start, end = (
            min(e["ts"] for e in spans),
            max(e["ts"] + e["dur"] for e in spans if e["name"] == SpanName.BACKWARD),
        )
        busy = [sum(e["dur"] for e in spans if e["tid"] == row) for row in sorted({e["tid"] for e in spans})]
        shares.append(1 - sum(busy) / (len(busy) * (end - start)))
        heaviest.append(max(busy) / mean(busy))
    return {"idle": median(shares), "busiest": median(heaviest)}


def idle(num_rounds: int, is_quick: bool) -> dict[str, Any]:
    """Two stages of so many layers that they are equal, but for the first, whose input needs no gradient."""
    width, num_layers, num_shards = (128, 6, 8) if is_quick else (384, 40, 8)
    batch_size = 1024 if is_quick else 2048  # so large that additions of gradients are little beside the passes
    X = numbers((2 if is_quick else 4) * batch_size, width)
    settings = {
        "model": mlp(width, num_layers), "data": (X, X), "loss": "mse", "lr": 1e-3, "batch_size": batch_size,
        "devices": 2, "shards": num_shards, "epochs": 3, "split": "network", "stages": str(num_layers),
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {"1f1b": [], "gpipe": []}
    for _ in range(num_rounds):
        for order, each in found.items():
            each.append(traced_idle({**settings, "pipeline": order}))
    theory = 1 / (num_shards + 1)
    for order, each in found.items():
        share, busiest = (median(one[key] for one in each) for key in ("idle", "busiest"))
        print(f"  {order}: idle {share:.3f}, in theory {theory:.3f}; the busiest device has {busiest:.2f} of the mean")
    return {"theory": theory, "rounds": found, "idle": {o: median(e["idle"] for e in f) for o, f in found.items()}}


def network(num_rounds: int, is_quick: bool) -> dict[str, Any]:
    """ResNet-18, whose late layers have the parameters."""
    num_samples, width = (64, 8) if is_quick else (256, 64)
    X, y = numbers(num_samples, 1, 28, 28), np.arange(num_samples, dtype="int64") % 10
    ways = {"one device": {"devices": 1}, "network=2": {"split": "network=2"}, "data=2": {"split": "data=2"}}
    found = compare(
        ways, num_rounds, model=lambda: ResNet18(1, 10, width), data=(X, y), shards=16, batch_size=num_samples // 2,
        lr=0.01, momentum=0.9, epochs=2,
    )  # fmt: skip
    memory = found["device_memory"]
    share = largest(memory["network=2"]) / largest(memory["one device"])
    faster = 1 / found["ratios"]["network=2"]["median"]
    print(f"  two stages are {faster:.2f} times faster, with {share:.2f} of the memory of one device")
    return found | {"times_faster": faster, "memory_share": share}


def update(num_rounds: int, is_quick: bool) -> dict[str, Any]:
    """Sixteen equal layers, so that owners can have equal parts."""
    width = 64 if is_quick else 512
    X = numbers(512, width)
    ways = {"replicated": {"update": "replicated"}, "sharded": {"update": "sharded"}}
    found = compare(
        ways, num_rounds, model=mlp(width, 16), data=(X, X), loss="mse", optimizer="adamw", batch_size=256, epochs=5,
        devices=4,
    )  # fmt: skip
    memory = found["device_memory"]
    share = largest(memory["sharded"], "optimizer") / largest(memory["replicated"], "optimizer")
    print(f"  the optimizer's state of a device is {share:.3f} of the replicated one")
    return found | {"optimizer_share": share}


def layers(num_rounds: int, is_quick: bool) -> dict[str, Any]:
    """Layers that are wide enough for slices."""
    width = 128 if is_quick else 1024
    X, common = numbers(512, width), {"model": mlp(width, 4), "loss": "mse", "lr": 1e-3, "batch_size": 256, "epochs": 5}
    ways = {"one device": {"devices": 1}, "layers=2": {"split": "layers=2"}, "data=2": {"split": "data=2"}}
    found = compare(ways, num_rounds, data=(X, X), slices=8, **common)
    share = largest(found["device_memory"]["layers=2"]) / largest(found["device_memory"]["one device"])
    print(f"  a device has {share:.2f} of the memory of one")
    whole: Ways = {"whole layers": {}, "8 slices": {"slices": 8}, "2 slices": {"slices": 2}}
    sliced = compare(whole, num_rounds, same_weights=False, data=(X, X), devices=1, **common)
    return found | {"memory_share": share, "cost_of_slices": sliced["ratios"]}


PARTS = {"idle": idle, "network": network, "update": update, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small models: only to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    result = describe_run("python benchmarks/splits.py", *sys.argv[1:])
    for name in arguments.parts.split(","):
        print(f"{name}:", flush=True)
        result[name] = PARTS[name](arguments.rounds, arguments.quick)
    append_result(arguments.out / "splits.jsonl", result)


if __name__ == "__main__":
    main()
