"""One hash for every split: models x splits x engines x batch sizes, of short runs.

    python benchmarks/split_matrix.py                               # PyTorch's models and LeNet
    python benchmarks/split_matrix.py resnet18 --batch-sizes 100    # one of them
    python benchmarks/split_matrix.py lenet --backend numpy --engines inprocess
    python benchmarks/split_matrix.py resnet18 --device cuda:0      # a GPU that is listed as often as needed

Every run has two full batches and a short one. Data is split between 1 to 4 devices, the network between 2 to 4 in both
orders, both at once, with a replicated and a sharded update; then all again with layers in 4 slices, split between 1, 2
and 4 devices and together with the data. ResNet-18 takes half an hour on two cores, the others a few minutes each.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.bench.results import append_result, describe_run
from lockstep.data import load_dataset
from lockstep.models.transformer import Transformer

RESULTS = Path(__file__).parent / "results"
NUM_TOKENS, LENGTH = 32, 12
WHOLE: list[dict[str, Any]] = [
    *({"split": f"data={k}"} for k in (1, 2, 3, 4)),
    *({"split": f"network={k}", "pipeline": order} for k in (2, 3, 4) for order in ("1f1b", "gpipe")),
    {"split": "data=2,network=2"},
    *({"split": f"data={k}", "update": "sharded"} for k in (2, 3, 4)),
    {"split": "data=2,network=2", "update": "sharded"},
]
IN_SLICES: list[dict[str, Any]] = [
    {"split": split, "slices": 4} for split in ("data=1", "layers=2", "layers=4", "data=2,layers=2", "network=2")
]


def sequential() -> nn.Module:
    """A user's own network, with batch norm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def transformer() -> nn.Module:
    """One with dropout, and an embedding that is the output layer, too."""
    torch.manual_seed(0)
    return Transformer(NUM_TOKENS, LENGTH, width=32, num_heads=2, num_blocks=3, dropout=0.2)


MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"model": "lenet", "momentum": 0.9},
    "lenet-bn": {"model": "lenet-bn", "optimizer": "adamw", "lr": 1e-3},
    "mlp": {"model": "mlp", "momentum": 0.9},
    "sequential": {"model": sequential, "optimizer": "adamw", "lr": 1e-3},
    "transformer": {"model": transformer, "optimizer": "adamw", "lr": 1e-3},
    "resnet18": {"model": "resnet18", "optimizer": "adamw", "lr": 1e-3},
}


def data_for(model: str, num_samples: int) -> Any:
    """So many samples to train with, and ten to test."""
    if model == "transformer":
        tokens = torch.randint(NUM_TOKENS, (num_samples + 10, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        X, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    else:
        loaded = load_dataset("fashion-mnist-mini", None, lambda *progress: None)
        X, y = loaded.X_train[: num_samples + 10], loaded.y_train[: num_samples + 10]
    return (X[:num_samples], y[:num_samples]), (X[num_samples:], y[num_samples:])


def hashes(model: str, batch_size: int, how: dict[str, Any], given: argparse.Namespace, engine: str) -> tuple[str, ...]:
    """Those of weights and buffers at the end of a run."""
    ways = [int(part.partition("=")[2]) for part in how["split"].split(",")]
    num_devices = ways[0] * (ways[1] if len(ways) > 1 else 1)
    devices = ",".join([given.device] * num_devices) if given.device else num_devices
    result = lockstep.train(
        **MODELS[model], **how, data=data_for(model, int(2.3 * batch_size)), batch_size=batch_size, epochs=1, shards=8,
        devices=devices, engine=engine, backend=given.backend, quiet=True, checkpoint_every=0,
    )  # fmt: skip
    return str(result.weights_sha256), str(result.buffers_sha256)


def main() -> None:
    """Runs the matrix of the models that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--batch-sizes", default="256,100,7")
    parser.add_argument("--engines", default="inprocess,processes")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", help="like cuda:0; default: logical CPU devices")
    given = parser.parse_args()
    for model in given.models:
        found: dict[str, Any] = {}
        for batch_size in map(int, given.batch_sizes.split(",")):
            for name, ways in (("whole", WHOLE), ("slices", IN_SLICES)):
                seen = {
                    (engine, str(how)): hashes(model, batch_size, how, given, engine)
                    for engine in given.engines.split(",")
                    for how in ways
                }
                one = len(set(seen.values())) == 1
                found[f"batch {batch_size}, {name}"] = {"runs": len(seen), "hashes": sorted(set(seen.values()))}
                print(f"{model}, batch {batch_size}, {name}: {len(seen)} runs, "
                      f"{'one hash' if one else f'DIFFERENT: {seen}'}", flush=True)  # fmt: skip
        described = describe_run("python", "benchmarks/split_matrix.py", *sys.argv[1:])
        append_result(RESULTS / "split_matrix.jsonl", described | {"model": model, "backend": given.backend, **found})


if __name__ == "__main__":
    main()
