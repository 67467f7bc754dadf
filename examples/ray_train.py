"""`lockstep.train` inside Ray Train's TorchTrainer: the same weights, bit for bit, for any number of workers.

    pip install 'ray[train]' && python examples/ray_train.py

Ray starts the workers, on one machine or on a cluster, and tells each its rank as torchrun does. Every worker calls
`lockstep.train` with the same settings; the one with rank 0 records the run, here as Ray's checkpoint.
"""

import os
import sys
import tempfile

import ray
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import lockstep

SETTINGS = {"model": "mlp", "data": "fashion-mnist-mini", "batch_size": 100, "lr": 0.1, "epochs": 2, "seed": 0}


def train_on_worker(settings):
    """What every worker does."""
    is_first = train.get_context().get_world_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        result = lockstep.train(**settings, out=os.path.join(folder, "run"), quiet=True)
        found = {"weights_sha256": result.weights_sha256, "k": len(result.devices)}
        train.report(found, checkpoint=Checkpoint.from_directory(os.path.join(folder, "run")) if is_first else None)


def main(numbers=(1, 2, 3), settings=SETTINGS):
    """The hashes for these numbers of workers, and that of this process alone."""
    hashes = {"--devices 1": lockstep.train(1, **settings, quiet=True).weights_sha256}
    ray.init(num_cpus=max(numbers) + 1, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        for k in numbers:
            workers, files = ScalingConfig(num_workers=k), RunConfig(storage_path=tempfile.mkdtemp(prefix="ray-"))
            metrics = (
                TorchTrainer(train_on_worker, train_loop_config=settings, scaling_config=workers, run_config=files)
                .fit()
                .metrics
            )
            assert metrics["k"] == k, metrics
            hashes[f"{k} workers"] = metrics["weights_sha256"]
    finally:
        ray.shutdown()
    return hashes


if __name__ == "__main__":
    found = main(tuple(map(int, sys.argv[1:])) or (1, 2, 3))
    for name, sha256 in found.items():
        print(f"{name:12} {sha256}")
    print(f"{len(set(found.values()))} hash for {len(found)} runs")
