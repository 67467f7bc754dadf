"""What `--portable` costs, and that it gives one hash whatever vector unit the libraries believe to have.

    python benchmarks/portable.py --rounds 3

Each model is trained with the processor's own kernels and with --portable, one after the other in every round; with
--portable also under variables that hide AVX-512. Appends to benchmarks/results/.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from lockstep.backends import load_backend
from lockstep.bench.results import append_result, describe_run
from lockstep.core.device import Device
from lockstep.data.fashion_mnist import MINI

RESULTS = Path(__file__).parent / "results" / "portable.jsonl"
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
AVX512 = {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}
SETTINGS = {"own": ([], {}), "portable": (["--portable"], AVX512), "portable, no AVX-512": (["--portable"], AVX2)}
MODELS = {  # data, batch size, learning rate
    "lenet": ("fashion-mnist-mini", 256, 0.1),
    "resnet18": ("images.npz", 64, 0.05),
    "transformer": ("tokens.npz", 16, 0.01),
}


def make_data(folder: Path) -> None:
    """A few images, for a model that takes its time, and random tokens."""
    with np.load(MINI) as mini:
        names = [f"{x}_{part}" for x in "Xy" for part in ("train", "test")]
        np.savez(folder / "images.npz", **{name: mini[name][: 256 if "train" in name else 64] for name in names})
    draw = np.random.RandomState(0)
    tokens = {part: draw.randint(0, 100, (size, 65)) for part, size in (("train", 128), ("test", 16))}
    samples = {f"X_{part}": both[:, :-1] for part, both in tokens.items()}
    np.savez(folder / "tokens.npz", **samples, **{f"y_{part}": both[:, 1:] for part, both in tokens.items()})


def train(folder: Path, model: str, setting: str) -> tuple[float, str]:
    """Seconds of the faster of two epochs, and the hash."""
    data, batch_size, rate = MODELS[model]
    options, variables = SETTINGS[setting]
    command = [sys.executable, "-m", "lockstep", "train", "--model", model, "--data", data, "--epochs", "2", "--json"]
    command += ["--batch-size", str(batch_size), "--lr", str(rate), "--devices", "2", "--verify-every", "0", *options]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout)
    return min(epoch["seconds"] for epoch in result["history"]), result["weights_sha256"]


def main() -> int:
    """Prints and keeps hashes and ratios; the number of models that have several hashes with --portable."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    capability, wrong = load_backend("torch").kernel_choice(Device("cpu:0"))["CPU capability"], 0
    with tempfile.TemporaryDirectory() as name:
        make_data(Path(name))
        for model in options.models.split(","):
            rounds = [{each: train(Path(name), model, each) for each in SETTINGS} for _ in range(options.rounds)]
            hashes = {each: sorted({one[each][1][:12] for one in rounds}) for each in SETTINGS}
            ratios = [one["portable"][0] / one["own"][0] for one in rounds]
            wrong += len({digest for each in SETTINGS if each != "own" for digest in hashes[each]}) > 1
            figures = {"model": model, "cpu": capability, "hashes": hashes, "portable / own": round(median(ratios), 2)}
            figures |= {"lowest": round(min(ratios), 2), "highest": round(max(ratios), 2)}
            print(json.dumps(figures), flush=True)
            command = f"python benchmarks/portable.py {' '.join(sys.argv[1:])}".rstrip()
            append_result(options.out, {**describe_run(command), **figures})
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
