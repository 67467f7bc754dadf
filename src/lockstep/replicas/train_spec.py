"""How a module is trained: what all ranks have in common."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.models.losses import PerSample
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.optim.torch_optimizers import MakeOptimizer
from lockstep.replicas.stage_module import CutModule


@dataclass
class Drawing:
    """Whether a compiled model draws random numbers: what one rank finds out is known to all of its process."""

    has_drawn: bool = False


@dataclass(frozen=True)
class TrainSpec:
    """How a module is trained: the same for all ranks."""

    module: nn.Module  # the user's own; never trained itself
    loss: PerSample
    metrics: dict[str, PerSample]  # means over samples
    optimizer: MakeOptimizer
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    seed: int
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    clip_norm: float | None = None
    sync_batch_norm: bool = False  # statistics of the whole batch
    loss_over_batch: bool = False  # the loss sees the outputs of all shards together
    keeps_outputs: bool = False  # of evaluated samples, for metrics that are no means
    ema: float | None = None  # the decay of a moving average of the weights
    precision: str = "fp32"
    device_kind: str = "cpu"
    channels_last: bool = False  # memory format of images and of convolution kernels
    compiled_sizes: frozenset[int] = frozenset()  # shards with so many samples are compiled; others are not worth it
    num_slices: int = 0  # of a layer's output units; 0: layers are not sliced
    in_one_piece: frozenset[str] = frozenset()  # layers that are not sliced
    cut: CutModule | None = None  # the module in stages
    names: tuple[str, ...] = ()  # of all trained parameters, in model order; of sliced layers, those of their slices
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of these
    drawing: Drawing = field(default_factory=Drawing)

    def without_values(self, name: str) -> nn.Parameter:
        """A parameter's shape, for a rank that does not update it."""
        return nn.Parameter(torch.empty(self.shapes[name], device="meta"))

    def autocast(self) -> torch.autocast:
        """The run's precision."""
        # no cache: it belongs to the whole process, so its content would depend on the other ranks
        return torch.autocast(self.device_kind, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)

    @property
    def compiles(self) -> bool:
        """Whether shards are compiled."""
        return bool(self.compiled_sizes)
