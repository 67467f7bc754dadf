"""PyTorch's loss modules that return a mean: as a sum and a weight, so that the batch's mean is exact."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.models.losses import first, shaped_like

BY_LABEL = (nn.CrossEntropyLoss, nn.NLLLoss)
BY_SAMPLE = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
BY_ENTRY = (
    nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
)


def with_exact_mean(loss: Any) -> Any:
    """The loss, where it is no such module; else one that gives the pair (sum, weight)."""
    if type(loss) not in (*BY_LABEL, *BY_SAMPLE, *BY_ENTRY):  # not one's own subclasses
        return loss
    if loss.reduction == "sum":
        raise ConfigError("The loss adds up over the samples. Use reduction='mean': the mean over the batch is exact.")
    return SumAndWeight(loss) if loss.reduction in ("mean", "batchmean") else loss


class SumAndWeight(nn.Module):
    """A loss module with reduction="mean" or "batchmean", in two parts."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self._sum, self._is_per_sample = copy.deepcopy(loss), loss.reduction == "batchmean"
        self._sum.reduction = "sum"

    def forward(self, output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over what counts, and how much that is."""
        scores = first(output)
        if isinstance(self._sum, BY_LABEL) and not y.is_floating_point():
            counted = y != self._sum.ignore_index
            weights = self._sum.weight
            share = counted if weights is None else torch.where(counted, weights[torch.where(counted, y, 0)], 0.0)
            return self._sum(scores, y), share.sum(dtype=torch.float64)
        if isinstance(self._sum, BY_LABEL):
            count = y.numel() // y.shape[1]  # soft labels
        elif isinstance(self._sum, BY_SAMPLE):
            count = len(y)
        else:
            count, scores = len(y) if self._is_per_sample else y.numel(), shaped_like(scores, y)
        return self._sum(scores, y), torch.tensor(count, dtype=torch.float64)
