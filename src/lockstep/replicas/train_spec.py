"""How a module is trained."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.models.losses import PerSample
from lockstep.optim.torch_optimizers import MakeOptimizer
from lockstep.optim.lr_schedule import Rates


@dataclass(frozen=True)
class ModuleRecipe:
    """How a module is trained: the same for all ranks."""

    module: nn.Module  # the user's own; never trained itself
    loss: PerSample
    metrics: dict[str, PerSample]
    optimizer: MakeOptimizer
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    seed: int
    rates: Rates = field(default_factory=Rates)
    clip_norm: float | None = None
    is_sync: bool = False  # batch norm over the whole batch
    precision: str = "fp32"
    channels_last: bool = False  # how images and their kernels lie in memory
    compiles: bool = False  # the module is made into code of its own
