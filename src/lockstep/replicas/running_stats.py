"""Running statistics of norm layers, as if the shards of a batch had come one after the other.

A layer with momentum m turns its statistics r into (1-m) r + m x when it sees a shard whose statistics are x. Started
from zero, it leaves m x; the merge then goes through the shards in their order: r <- (1-m) r + (what the shard left).
All layers' statistics lie in one vector, so this takes a few operations a shard, however many layers there are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.layout import Layout

Norm = Any  # a layer of this kind: batch norm and instance norm, of any number of dimensions
NORM = nn.modules.batchnorm._NormBase
BATCH_NORM = nn.modules.batchnorm._BatchNorm


def has_running_stats(layer: nn.Module) -> bool:
    """Whether the layer has running statistics."""
    return isinstance(layer, NORM) and layer.running_mean is not None and layer.running_mean.dtype == torch.float32


def norms_of(module: nn.Module) -> list[Norm]:
    """The layers that have running statistics."""
    return [layer for layer in module.modules() if has_running_stats(layer)]


class RunningStats:
    """The running statistics of `norms`, which become views of one vector.

    With `sync_batch_norm` they are those of the whole batch: every shard leaves them as they are to be.
    """

    def __init__(self, norms: list[Norm], sync_batch_norm: bool) -> None:
        self.norms, self._is_sync = norms, sync_batch_norm
        if not norms:
            return
        found = [(norm, name) for norm in norms for name in ("running_mean", "running_var")]
        buffers = [norm._buffers[name] for norm, name in found]
        layout = Layout(tuple(name for _, name in found), tuple(tuple(buffer.shape) for buffer in buffers))
        device = buffers[0].device
        self._values = torch.zeros(layout.size, dtype=torch.float32, device=device)
        self._counts = torch.stack([norm.num_batches_tracked for norm in norms])
        self._layer = torch.zeros(layout.size, dtype=torch.int64, device=device)  # of each entry
        for number, (view, piece) in enumerate(
            zip(self._values.split(layout.pieces)[::2], self._layer.split(layout.pieces)[::2], strict=True)
        ):
            view.copy_(buffers[number])
            piece.fill_(number // 2)
            norm, name = found[number]
            norm._buffers[name] = view.view(buffers[number].shape)
        for number, norm in enumerate(norms):
            if isinstance(norm, BATCH_NORM):
                norm._buffers["num_batches_tracked"] = self._counts[number]
            else:  # instance norm does not count its calls
                norm.register_forward_pre_hook(partial(self._count, number))
        self._settings: list[tuple[bool, float | None]] = []
        # where they were before the step: always the same memory, which a captured CUDA graph reads
        self._start, self._start_counts = self._values.double(), self._counts.double()
        self._zeroed = self._values.clone()

    def _count(self, number: int, norm: nn.Module, inputs: Any) -> None:
        self._counts[number].add_(int(norm.training))

    def start_step(self) -> None:
        """Remembers what all shards start from. A layer that is not training uses its statistics: they stay."""
        if not self.norms:
            return
        settings = [(norm.training, norm.momentum) for norm in self.norms]
        if settings != self._settings:  # as a rule once in a run
            self._settings = settings

            def per_entry(values: list[float]) -> Tensor:
                return torch.tensor(values, dtype=torch.float64, device=self._values.device)[self._layer]

            cumulative = [isinstance(norm, BATCH_NORM) and norm.momentum is None for norm in self.norms]
            self._is_active = per_entry([float(training) for training, _ in settings]).bool()
            self._is_cumulative = per_entry([float(entry) for entry in cumulative]).bool()
            self._keep = per_entry([1.0 - (momentum or 0.0) for _, momentum in settings])
        self._start.copy_(self._values)
        self._start_counts.copy_(self._counts)
        self._zeroed.copy_(torch.where(self._is_active, 0.0, self._values))

    def follow(self, other: "RunningStats") -> None:
        """Starts every step from where those of `other` are."""
        if self.norms:
            self._start, self._start_counts, self._zeroed = other._start, other._start_counts, other._zeroed

    def start_shard(self) -> None:
        """Zero where the layer will leave its own, what it was before the step elsewhere."""
        if self.norms and not self._is_sync:
            self._values.copy_(self._zeroed)
            self._counts.copy_(self._start_counts)

    def rewind(self) -> None:
        """What they were before the step that is under way."""
        if self.norms:
            self._values.copy_(self._start)
            self._counts.copy_(self._start_counts)

    def update(self) -> Tensor:
        """What a shard left, and how often each layer was called: one vector."""
        return torch.cat([self._values.double(), self._counts.double() - self._start_counts])

    def merge(self, updates: list[Tensor]) -> None:
        """The statistics after the step, from the updates of all shards in their order."""
        merged, counts, before = self._start, self._start_counts, self._start_counts[self._layer]
        for of_shard in updates:
            left, calls = of_shard.split([len(self._values), len(self._counts)])
            times, so_far = calls[self._layer], counts[self._layer]
            mean_of_all = (so_far * merged + (before + times) * left) / (so_far + times).clamp(min=1)  # no momentum
            after = torch.where(self._is_cumulative, mean_of_all, merged * self._keep**times + left)
            merged = torch.where(self._is_active, after, merged)
            counts = counts + calls
        if self._is_sync:  # all updates are equal, and a rank without shards needs them too
            merged, counts = left, self._start_counts + calls
        self._values.copy_(merged)
        self._counts.copy_(counts)
