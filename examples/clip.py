"""A contrastive loss over the whole batch, as CLIP has it: every image is compared with every text.

python examples/clip.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep


class TwoTowers(nn.Module):
    """An encoder for each side, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.texts = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.images(images)), F.normalize(self.texts(texts)), self.scale.exp()


def contrastive(output: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    """Gets the outputs of all shards together, in the order of the batch."""
    images, texts, scale = output
    scores, own = scale * images @ texts.T, torch.arange(len(images), device=images.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def main(num_epochs: int = 10) -> set[str]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 8, generator=draw)  # what both sides have in common
    images = hidden @ torch.randn(8, 32, generator=draw)
    texts = hidden @ torch.randn(8, 24, generator=draw)
    hashes = set()
    for devices in (1, 2, 3):
        result = lockstep.train(
            model=TwoTowers,
            data=((images.numpy(), texts.numpy()), torch.zeros(512).numpy()),
            loss=contrastive,
            over="batch",  # the loss looks across the batch; without it, each shard would be a batch of its own
            optimizer="adamw",
            lr=3e-3,
            batch_size=64,
            epochs=num_epochs,
            devices=devices,
            quiet=True,
        )
        print(f"{devices} devices: loss {result.history[0].train_loss:.3f} -> {result.history[-1].train_loss:.3f}")
        hashes.add(result.weights_sha256)
    return hashes


if __name__ == "__main__":
    main()
