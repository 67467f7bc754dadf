"""A multilayer perceptron, for vectors or images: `--model mlp`."""

import math

from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.data import Dataset
from lockstep.models.images import check_labels


class MLP(nn.Module):
    """Two hidden layers with dropout.

    >>> import torch
    >>> MLP(784)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, in_features: int, num_classes: int = 10, hidden: int = 256, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(in_features, hidden), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, X: Tensor) -> Tensor:
        """Class scores for samples of any shape with `in_features` entries."""
        return self.layers(X)


def mlp(data: Dataset) -> MLP:
    """The model for the samples of a dataset."""
    if data.sample_shape is None:
        raise ConfigError(f"mlp takes one array of samples, and those of {data.name} have several parts.")
    check_labels(data, "mlp")
    return MLP(math.prod(data.sample_shape), data.num_classes)
