"""What each of LeNet's speed-ups on a CPU brings: forward and backward of one shard on one core, interleaved rounds.

    python benchmarks/lenet.py
    python benchmarks/lenet.py --rounds 2 --out /tmp/results

- plain: convolution, ReLU and pooling one after the other, on 28x28 images (models/lenet.py)
- crop: the same on 26x26 images (models/lenet_cropped.py)
- fused: the kernels of backends/torch/lenet_cpu.py, on 28x28 images
- both: crop and fused, which is what `lockstep train` runs
- both-python: the same without TorchScript: its functions run in the Python interpreter

both and both-python are measured on two threads at once too, each with a core and a shard of its own. In a loop over
one shard they hardly meet at the GIL; in the steps of a run they do more often:

    python benchmarks/lenet.py --steps

trains with two devices, with TorchScript and without it, in processes that take turns.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch

from lockstep.backends import Ops
from lockstep.backends.hardware import pin_to_core
from lockstep.backends.torch import BACKEND, TorchOps, lenet_cpu
from lockstep.bench.results import append_result, describe_run
from lockstep.bench.tables import Row, Table
from lockstep.core.device import Device
from lockstep.data import load_dataset
from lockstep.models.lenet import init_lenet, lenet
from lockstep.models.lenet_cropped import lenet_cropped

RESULTS = Path(__file__).parent / "results"
DEVICES = [Device("cpu:0"), Device("cpu:1")]
NUM_SAMPLES = 32  # of a shard: a batch of 256 in 8 shards
THREADS = "-2-threads"


class Variant(NamedTuple):
    """One way to compute LeNet."""

    net: Callable[[Any, list[Any]], Any]
    conv_relu_pool2d: Callable[..., Any]  # in place of that of `TorchOps`


def without_torchscript() -> ModuleType:
    """Another copy of backends/torch/lenet_cpu.py, whose functions are run by the Python interpreter."""
    spec = importlib.util.spec_from_file_location("lenet_cpu_python", lenet_cpu.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch("torch.jit.script", lambda function: function):
        spec.loader.exec_module(module)
    return module


def variants() -> dict[str, Variant]:
    in_python = without_torchscript().ConvReluPool2d

    def fused_in_python(ops: Ops, X: Any, weight: Any, bias: Any, size: int) -> Any:
        return in_python.apply(X, weight, bias, size)

    return {
        "plain": Variant(lenet, Ops.conv_relu_pool2d),
        "crop": Variant(lenet_cropped, Ops.conv_relu_pool2d),
        "fused": Variant(lenet, TorchOps.conv_relu_pool2d),
        "both": Variant(lenet_cropped, TorchOps.conv_relu_pool2d),
        "both-python": Variant(lenet_cropped, fused_in_python),
    }


def gradients(net: Callable[[Any, list[Any]], Any], params: list[Any], X: Any, y: Any) -> Any:
    """Forward and backward of one shard."""
    return torch.autograd.grad(BACKEND.ops.cross_entropy_sum(net(X, params), y), params)


def measure(num_rounds: int, num_repeats: int) -> Table:
    """The seconds of a shard in every variant, one for each round."""
    data = load_dataset("fashion-mnist-mini")
    shards = []
    for rank in range(2):
        samples = slice(rank * NUM_SAMPLES, (rank + 1) * NUM_SAMPLES)
        X, y = torch.from_numpy(data.X_train[samples]).float() / 255, torch.from_numpy(data.y_train[samples]).long()
        shards.append(([torch.from_numpy(param).requires_grad_() for param in init_lenet(seed=0).values()], X, y))

    def start_thread(rank: int) -> None:
        BACKEND.start_worker(DEVICES[rank])  # one intra-op thread
        pin_to_core(rank, 2)

    def run(net: Callable[[Any, list[Any]], Any], rank: int) -> None:
        for _ in range(num_repeats):
            gradients(net, *shards[rank])

    ways = variants()
    rows = {name: Row(name) for name in (*ways, f"both{THREADS}", f"both-python{THREADS}")}
    threads = [ThreadPoolExecutor(1, initializer=start_thread, initargs=(rank,)) for rank in range(2)]
    with BACKEND.session(DEVICES):
        expected = gradients(lenet, *shards[0])
        for round_number in range(num_rounds + 1):  # the first warms up
            for name, row in rows.items():
                net, conv_relu_pool2d = ways[name.removesuffix(THREADS)]
                with mock.patch.object(TorchOps, "conv_relu_pool2d", conv_relu_pool2d):
                    if round_number == 0:
                        torch.testing.assert_close(gradients(net, *shards[0]), expected, rtol=1e-4, atol=1e-4)
                    began = time.perf_counter()
                    running = [
                        thread.submit(run, net, rank)
                        for rank, thread in enumerate(threads if name.endswith(THREADS) else threads[:1])
                    ]
                    for future in running:
                        future.result()
                    seconds = (time.perf_counter() - began) / num_repeats
                if round_number:
                    row.seconds.append(seconds)
            print(f"round {round_number} of {num_rounds}", file=sys.stderr, flush=True)
    for thread in threads:
        thread.shutdown()
    title = f"LeNet on the CPU: forward and backward of {NUM_SAMPLES} images, median of {num_rounds} rounds"
    notes = []
    for where, suffix in (("on one thread", ""), ("on two threads at once", THREADS)):
        ratio = median(rows[f"both-python{suffix}"].ratios(rows[f"both{suffix}"]))
        notes.append(f"{where}, the Python interpreter takes {ratio:.2f} times as long as TorchScript")
    settings = {"num_samples": NUM_SAMPLES, "rounds": num_rounds, "repeats_per_round": num_repeats}
    return Table(title, "plain", list(rows.values()), unit="shard", notes=notes, settings=settings)


EPOCHS = """
import lockstep
result = lockstep.train(2, num_epochs=40, lr=0.01, data="fashion-mnist-mini", quiet=True)
print(sorted(epoch.seconds for epoch in result.history[3:])[18], result.weights_sha256)
"""


def measure_steps(num_rounds: int) -> Table:
    """The seconds of an epoch (8 steps) on two devices with TorchScript and without it."""
    rows = {"torchscript": Row("torchscript"), "python": Row("python")}
    hashes = set()
    for round_number in range(num_rounds):
        for name, row in rows.items():
            environment = {**os.environ, "PYTORCH_JIT": str(int(name == "torchscript"))}
            done = subprocess.run(
                [sys.executable, "-c", EPOCHS], env=environment, check=True, capture_output=True, text=True
            )
            seconds, weights_sha256 = done.stdout.split()
            row.seconds.append(float(seconds) / 8)
            hashes.add(weights_sha256)
        print(f"round {round_number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    assert len(hashes) == 1, "the bits are the same"
    title = f"A step of LeNet on two logical devices, batch 256, median of {num_rounds} rounds"
    return Table(title, "torchscript", list(rows.values()), unit="step", settings={"rounds": num_rounds})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="many and short: others may use the machine")
    parser.add_argument("--repeats", type=int, default=10, help="shards of one round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps", action="store_true", help="TorchScript in the steps of a run, 9 rounds")
    arguments = parser.parse_args()
    table = measure_steps(9) if arguments.steps else measure(arguments.rounds, arguments.repeats)
    result = describe_run("python benchmarks/lenet.py", *sys.argv[1:]) | table.to_dict()
    append_result(arguments.out / "lenet.jsonl", result)
    print(table.text())


if __name__ == "__main__":
    main()
