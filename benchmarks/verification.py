"""What verification costs: the same steps with it and without, in turns.

    python benchmarks/verification.py --rounds 5

Prints the median ratio for LeNet's size of model and for one with batch norm; `verify_every` is the default.
"""

import argparse
import time
from statistics import median

import torch
from torch import nn

import lockstep

STEPS = 800  # of a round: two verifications


def make() -> nn.Module:
    """A network for images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(576, 10)
    )


def main() -> None:
    """Measures rounds of steps in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    batch = torch.rand(64, 1, 28, 28), torch.randint(10, (64,))
    with (
        lockstep.Trainer(make(), lr=0.01, devices=options.devices) as verified,
        lockstep.Trainer(make(), lr=0.01, devices=options.devices, verify_every=0) as plain,
    ):
        for trainer in (verified, plain):
            for _ in range(STEPS // 8):  # the first steps have checks of their own
                trainer.step(batch)
        ratios = []
        for _ in range(options.rounds):
            seconds = []
            for trainer in (verified, plain):
                began = time.perf_counter()
                for _ in range(STEPS):
                    trainer.step(batch)
                seconds.append(time.perf_counter() - began)
            ratios.append(seconds[0] / seconds[1])
            print(f"{seconds[0]:.2f} s verified, {seconds[1]:.2f} s not: {ratios[-1]:.4f}", flush=True)
        assert verified.weights_sha256 == plain.weights_sha256
    print(f"median ratio {median(ratios):.4f}")


if __name__ == "__main__":
    main()
