"""How a module is trained."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.models.losses import PerSample
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.optim.torch_optimizers import MakeOptimizer


@dataclass(frozen=True)
class TrainSpec:
    """How a module is trained: the same for all ranks."""

    module: nn.Module  # the user's own; never trained itself
    loss: PerSample
    metrics: dict[str, PerSample]
    optimizer: MakeOptimizer
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    seed: int
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    clip_norm: float | None = None
    sync_batch_norm: bool = False  # statistics of the whole batch
    precision: str = "fp32"
    channels_last: bool = False  # memory format of images and of convolution kernels
    compiles: bool = False
