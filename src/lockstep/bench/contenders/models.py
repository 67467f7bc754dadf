"""The models as PyTorch modules with the initial weights of our own run; their loss and precision."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.bench.workload import Workload
from lockstep.data import Dataset
from lockstep.models import MODELS, BuiltIn
from lockstep.models.lenet import init_lenet
from lockstep.training.validation import made_module


class LeNet(nn.Sequential):
    """The text's LeNet, written with layers."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            *(nn.Conv2d(1, 20, kernel_size=3), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Conv2d(20, 50, kernel_size=5), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
        )
        with torch.no_grad():
            for param, array in zip(self.parameters(), init_lenet(seed).values(), strict=True):
                initial = torch.from_numpy(array)
                param.copy_(initial.T if initial.ndim == 2 else initial)  # nn.Linear has its weight transposed


def module_for(workload: Workload, data: Dataset) -> nn.Module:
    """The module, in training mode."""
    model, seed = MODELS[workload.model], workload.seed
    return (made_module(model, data, seed) if isinstance(model, BuiltIn) else LeNet(seed)).train()


def loss_sum(scores: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy, summed over samples; the mean over labels where a sample has several."""
    labels = y.flatten()
    if y.ndim > 1:  # classes last, as the model computes them: kernels are faster
        scores = scores.movedim(1, -1).flatten(0, -2)
    return F.cross_entropy(scores, labels, reduction="sum") / y[0].numel()


class WithLoss(nn.Module):
    """A model and its loss as one module: compiled together, and in one autocast, they are faster."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, X: Tensor, y: Tensor) -> Tensor:
        """The summed loss."""
        return loss_sum(self.module(X), y)


def reset_gpu_peaks(gpus: Iterable[int]) -> None:
    """What was needed before, to prepare, does not count."""
    for number in gpus:
        torch.cuda.synchronize(number)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(number)


def peak_gpu_bytes(gpus: Iterable[int], num_sample_bytes: int) -> int:
    """The most memory that PyTorch took from one of these GPUs, with that of CUDA graphs, beside the samples."""
    return max((torch.cuda.max_memory_reserved(number) - num_sample_bytes for number in gpus), default=0)


def set_precision(precision: str) -> None:
    """Allows tf32 in matrix products and convolutions on GPUs, or not: PyTorch allows it in convolutions by default."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
