"""ResNet-18 for small images, as in the text's next chapter: a 3x3 stem without pooling. `--model resnet18`."""

from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data import Dataset
from lockstep.models.images import image_shape


class Residual(nn.Module):
    """Two convolutions with batch norm, and a skip connection."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = None
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, kernel_size=1, stride=stride)

    def forward(self, X: Tensor) -> Tensor:
        Y = F.relu(self.norm1(self.conv1(X)))
        Y = self.norm2(self.conv2(Y))
        return F.relu(Y + (X if self.shortcut is None else self.shortcut(X)))


class ResNet18(nn.Module):
    """A stem, four stages of two residual blocks each, global average pooling and a linear layer.

    >>> import torch
    >>> ResNet18(in_channels=1)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, kernel_size=3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks, channels = [], width
        for stage, wider in enumerate((width, 2 * width, 4 * width, 8 * width)):
            blocks += [Residual(channels, wider, stride=1 if stage == 0 else 2), Residual(wider, wider, stride=1)]
            channels = wider
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(8 * width, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, X: Tensor) -> Tensor:
        """Class scores for images of shape (samples, channels, height, width)."""
        return self.classify(self.blocks(self.stem(X)).mean(dim=(2, 3)))


def resnet18(data: Dataset) -> ResNet18:
    """The model for the images of a dataset."""
    channels, _, _ = image_shape(data, "resnet18", smallest=8)
    return ResNet18(channels, data.num_classes)
