"""A generative adversarial network: two trainers, whose losses see each other's modules.

python examples/gan.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep


def bce(scores: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores.squeeze(1), y, reduction="none")


def points(num_samples: int, draw: torch.Generator) -> Tensor:
    """Points on a circle: what the generator is to imitate."""
    angle = 2 * torch.pi * torch.rand(num_samples, generator=draw)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def main(devices: int = 2, num_steps: int = 300, batch_size: int = 128) -> tuple[str, str]:
    torch.set_num_threads(1)  # what is computed between steps is yours: more threads add in another order
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    draw = torch.Generator().manual_seed(0)
    real, fake = torch.ones(batch_size), torch.zeros(batch_size)
    how = {"optimizer": "adam", "lr": 1e-3, "devices": devices}
    with (
        lockstep.Trainer(discriminator, loss=bce, **how) as critic,
        # `critic.module` is the replica of the device that asks, so nothing is copied between devices
        lockstep.Trainer(generator, loss=lambda found, y: bce(critic.module(found), y), **how) as artist,
    ):
        for step in range(1, num_steps + 1):
            noise = torch.randn(batch_size, 8, generator=draw)
            with torch.no_grad():
                made = artist.module(noise)
            told = critic.step((torch.cat([points(batch_size, draw), made]), torch.cat([real, fake])))
            fooled = artist.step((noise, real))
            if step % 100 == 0:
                radius = made.norm(dim=1).mean()
                print(f"step {step}: critic {told.loss:.3f}, artist {fooled.loss:.3f}, mean radius {radius:.3f}")
        return critic.weights_sha256, artist.weights_sha256


if __name__ == "__main__":
    main()
