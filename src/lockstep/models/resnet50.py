"""ResNet-50 for images of about 224x224, with blocks of three convolutions: `--model resnet50`."""

from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data import Dataset
from lockstep.models.images import image_shape

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 with batch norm, and a skip connection; four times as wide at its end."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(in_channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = None
        if stride != 1 or in_channels != 4 * width:
            convolution = nn.Conv2d(in_channels, 4 * width, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, X: Tensor) -> Tensor:
        Y = F.relu(self.norm1(self.conv1(X)))
        Y = F.relu(self.norm2(self.conv2(Y)))
        return F.relu(self.norm3(self.conv3(Y)) + (X if self.shortcut is None else self.shortcut(X)))


class ResNet50(nn.Module):
    """A stem, four stages of blocks, global average pooling and a linear layer.

    >>> import torch
    >>> ResNet50(num_classes=7)(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 7])
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks, channels = [], 64
        for width, num_blocks, stride in STAGES:
            for number in range(num_blocks):
                blocks.append(Bottleneck(channels, width, stride if number == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, X: Tensor) -> Tensor:
        """Class scores for images of shape (samples, channels, height, width)."""
        return self.classify(self.blocks(self.stem(X)).mean(dim=(2, 3)))


def resnet50(data: Dataset) -> ResNet50:
    """The model for the images of a dataset."""
    channels, _, _ = image_shape(data, "resnet50", smallest=32)
    return ResNet50(channels, data.num_classes)
