"""The models as PyTorch modules, with the numbers that our own run starts from; their loss and their precision."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.bench.work import Work
from lockstep.data import Dataset
from lockstep.models import MODELS, BuiltIn
from lockstep.models.lenet import init_lenet
from lockstep.training.validation import made_module


class LeNet(nn.Module):
    """The text's LeNet as it would be written with layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 20, kernel_size=3),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(20, 50, kernel_size=5),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))
        with torch.no_grad():
            for param, array in zip(self.parameters(), init_lenet(seed).values(), strict=True):
                start = torch.from_numpy(array)
                param.copy_(start.T if start.ndim == 2 else start)  # a linear layer has its weight the other way round

    def forward(self, X: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.classify(self.features(X))
        return scores


def module_for(work: Work, data: Dataset) -> nn.Module:
    """The module, in training mode."""
    model = MODELS[work.model]
    module = made_module(model, data, work.seed) if isinstance(model, BuiltIn) else LeNet(work.seed)
    return module.train()


def loss_sum(scores: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy, summed over samples; where a sample has several labels, their mean."""
    return F.cross_entropy(scores.float(), y, reduction="sum") / y[0].numel()


def set_precision(precision: str) -> None:
    """Lets matrix products and convolutions on GPUs round to tf32, or not: PyTorch lets convolutions by default."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
