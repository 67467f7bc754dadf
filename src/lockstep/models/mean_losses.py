"""PyTorch's loss modules that return a mean: as a sum and a weight, so that the batch's mean is exact."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.losses import first

BY_LABEL = (nn.CrossEntropyLoss, nn.NLLLoss)
BY_ENTRY = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss)


def with_exact_mean(loss: Any) -> Any:
    """The loss, where it is no such module; else one that gives the pair (sum, weight)."""
    is_mean = getattr(loss, "reduction", "") == "mean"
    return SumAndWeight(loss) if is_mean and isinstance(loss, (*BY_LABEL, *BY_ENTRY)) else loss


class SumAndWeight(nn.Module):
    """A loss module with reduction="mean", in two parts."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self._sum = copy.deepcopy(loss)
        self._sum.reduction = "sum"

    def forward(self, output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over what counts, and how much that is."""
        scores = first(output)
        if isinstance(self._sum, BY_LABEL) and not y.is_floating_point():
            counted = y != self._sum.ignore_index
            weights = self._sum.weight
            share = counted if weights is None else torch.where(counted, weights[torch.where(counted, y, 0)], 0.0)
            return self._sum(scores, y), share.sum(dtype=torch.float64)
        num_entries = y.numel() // (y.shape[1] if isinstance(self._sum, BY_LABEL) else 1)
        return self._sum(scores, y), torch.tensor(num_entries, dtype=torch.float64)
