"""LeNet with batch norm and dropout: `--model lenet-bn`."""

from torch import Tensor, nn

from lockstep.data import Dataset
from lockstep.models.images import image_shape


class LeNetBN(nn.Module):
    """The text's LeNet, its convolutions normalized, with dropout before the last layer.

    >>> import torch
    >>> LeNetBN()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, image: tuple[int, int, int] = (1, 28, 28), num_classes: int = 10, dropout: float = 0.5) -> None:
        super().__init__()
        channels, height, width = image
        size = 50 * (((height - 2) // 2 - 4) // 2) * (((width - 2) // 2 - 4) // 2)
        self.features = nn.Sequential(  # convolutions without bias: the norm layers have one
            *(nn.Conv2d(channels, 20, kernel_size=3, bias=False), nn.BatchNorm2d(20), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Conv2d(20, 50, kernel_size=5, bias=False), nn.BatchNorm2d(50), nn.ReLU(), nn.AvgPool2d(2)),
        )
        self.classify = nn.Sequential(
            nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, num_classes)
        )

    def forward(self, X: Tensor) -> Tensor:
        """Class scores for images of shape (samples, channels, height, width)."""
        return self.classify(self.features(X))


def lenet_bn(data: Dataset) -> LeNetBN:
    """The model for the images of a dataset."""
    return LeNetBN(image_shape(data, "lenet-bn", smallest=14), data.num_classes)
