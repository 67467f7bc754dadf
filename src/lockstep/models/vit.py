"""ViT-B/16: an encoder for the patches of an image. `--model vit-b-16`."""

import torch
from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.data import Dataset
from lockstep.models.attention import FeedForward, SelfAttention, Size
from lockstep.models.images import image_shape

PATCH = 16


class Block(nn.Module):
    """Self-attention and two linear layers, each with layer norm before it and a skip connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width, eps=1e-6), nn.LayerNorm(size.width, eps=1e-6)
        self.attend, self.feed_forward = SelfAttention(size), FeedForward(size)

    def forward(self, X: Tensor) -> Tensor:
        X = X + self.attend(self.norm1(X))
        return X + self.feed_forward(self.norm2(X))


class ViT(nn.Module):
    """Class scores from the output at one more position, which has no patch.

    >>> small = Size(width=32, num_heads=2, num_blocks=2)
    >>> ViT((1, 28, 28), num_classes=10, patch=4, size=small)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        image: tuple[int, int, int] = (3, 224, 224),
        num_classes: int = 1000,
        patch: int = PATCH,
        size: Size | None = None,
    ) -> None:
        super().__init__()
        size, (channels, height, width) = size or Size(), image
        self.patches = nn.Conv2d(channels, size.width, patch, stride=patch)
        num_patches = (height // patch) * (width // patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(torch.empty(1, num_patches + 1, size.width).normal_(std=0.02))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.num_blocks)))
        self.norm, self.classify = nn.LayerNorm(size.width, eps=1e-6), nn.Linear(size.width, num_classes)

    def forward(self, X: Tensor) -> Tensor:
        """Class scores for images of shape (samples, channels, height, width)."""
        Y = self.patches(X).flatten(2).transpose(1, 2)
        Y = torch.cat([self.class_token.expand(len(X), -1, -1), Y], dim=1) + self.positions
        return self.classify(self.norm(self.blocks(Y))[:, 0])


def vit_b_16(data: Dataset) -> ViT:
    """The model for the images of a dataset."""
    _, height, width = shape = image_shape(data, "vit-b-16", smallest=PATCH)
    if height % PATCH or width % PATCH:
        raise ConfigError(
            f"vit-b-16 cuts images into patches of {PATCH}x{PATCH}, and those of {data.name} are {height}x{width}."
        )
    return ViT(shape, data.num_classes)
