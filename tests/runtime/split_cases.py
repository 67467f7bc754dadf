"""Models and data for runs whose network, layers and update are split, and a program that trains them.

Runs of processes need a program of their own: a process that has used a GPU cannot start workers for one.
"""

import json
import sys

import torch

import lockstep
from lockstep.models.transformer import Transformer
from training.split_models import IMAGES, VECTORS, Residual, Skip, seeded, sequential

GENERATOR = torch.Generator().manual_seed(0)
LARGER_IMAGES = torch.rand(72, 1, 28, 28, generator=GENERATOR), torch.randint(10, (72,), generator=GENERATOR)
TOKENS = tuple(torch.randint(32, (72, 12), generator=GENERATOR) for _ in range(2))


def transformer():
    return Transformer(num_tokens=32, length=12, width=32, num_heads=2, num_blocks=3, dropout=0.2)


LARGE = {"model": "resnet18", "data": LARGER_IMAGES, "batch_size": 32, "epochs": 1}
CASES = {
    "sequential": {"model": sequential, "data": IMAGES, "optimizer": "adamw", "lr": 0.01, "batch_size": 28},
    "residual": {"model": Residual, "data": IMAGES, "momentum": 0.9, "clip_norm": 0.05, "batch_size": 28},
    "skip": {"model": Skip, "data": VECTORS, "momentum": 0.9, "batch_size": 28},
    "lenet": {"model": "lenet", "data": "fashion-mnist-mini", "momentum": 0.9, "lr": 0.1, "batch_size": 250},
    "resnet18": {**LARGE, "optimizer": "adamw", "lr": 1e-3},
    "resnet18-bf16": {**LARGE, "lr": 0.01, "precision": "bf16"},
    "transformer": {"model": transformer, "data": TOKENS, "optimizer": "adamw", "lr": 1e-3, "batch_size": 32},
}  # fmt: skip
WHOLE = [
    ["network=2", {}],
    ["network=3", {"pipeline": "gpipe"}],
    ["network=4", {}],
    ["data=2,network=2", {"update": "sharded"}],
    ["data=3", {"update": "sharded"}],
]
IN_SLICES = [
    ["layers=2", {"slices": 4}],
    ["layers=4", {"slices": 4}],
    ["network=2,layers=2", {"slices": 4}],
    ["data=2", {"slices": 4}],
]


def num_devices(split):
    product = 1
    for part in split.split(","):
        product *= int(part.partition("=")[2])
    return product


def trained(case, split="data=1", device="cuda:0", **how):
    """Hashes and accuracy of a run on one device that is listed as often as the split needs it."""
    settings = {"epochs": 2, **CASES[case]}
    if callable(settings["model"]):
        settings["model"] = seeded(settings["model"])
    if not isinstance(settings["data"], str):
        settings["data"] = settings["data"], settings["data"]
    devices = ",".join([device] * num_devices(split)) if device.startswith("cuda") else num_devices(split)
    result = lockstep.train(
        devices=devices, split=split, shards=4, checkpoint_every=0, quiet=True, timeout=60.0,
        **settings, **how,
    )  # fmt: skip
    return [result.weights_sha256, result.buffers_sha256, result.test_accuracy]


if __name__ == "__main__":  # CASE '[["network=2", {}], ...]' DEVICE: a line for each of these runs, in processes
    for split, how in json.loads(sys.argv[2]):
        print(json.dumps(trained(sys.argv[1], split, sys.argv[3], engine="processes", **how)), flush=True)
