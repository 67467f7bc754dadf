"""Running statistics of norm layers, as if the shards of a batch had come one after the other.

A layer with momentum m turns its statistics r into (1-m) r + m x when it sees a shard whose statistics are x. Started
from zero, it ends with m x; the merge then goes through the shards in their order: r <- (1-m) r + (the shard's result).
All layers' statistics are in one vector, so this takes a few operations a shard, however many layers there are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.backends.torch.stacked import CannotStack, StackedTensor
from lockstep.core.layout import Layout

NORM = nn.modules.batchnorm._NormBase  # batch norm and instance norm, of any number of dimensions
BATCH_NORM = nn.modules.batchnorm._BatchNorm


def has_running_stats(layer: nn.Module) -> bool:
    """Whether it is a norm layer that has running statistics."""
    return isinstance(layer, NORM) and layer.running_mean is not None and layer.running_mean.dtype == torch.float32


class RunningStats:
    """The running statistics of `norms`, which become views of one vector.

    With `sync_batch_norm` they are those of the whole batch: every shard computes their final values. With
    `num_together`, so many shards are in the module at once: the vector has a row for each.
    """

    def __init__(self, norms: list[Any], sync_batch_norm: bool, num_together: int = 0) -> None:
        self.norms, self._is_sync = norms, sync_batch_norm
        if not norms:
            return
        found = [(norm, name) for norm in norms for name in ("running_mean", "running_var")]
        buffers = [norm._buffers[name] for norm, name in found]
        layout = Layout(tuple(name for _, name in found), tuple(tuple(buffer.shape) for buffer in buffers))
        self._values = torch.zeros(layout.size, dtype=torch.float32, device=buffers[0].device)
        self._counts = torch.stack([norm.num_batches_tracked for norm in norms])
        self._layer = torch.zeros_like(self._values, dtype=torch.int64)  # of each entry
        if num_together:
            self._use_rows(found, layout, num_together)
            return
        pieces = zip(self._values.split(layout.pieces)[::2], self._layer.split(layout.pieces)[::2], strict=True)
        for number, ((norm, name), buffer, (view, layer)) in enumerate(zip(found, buffers, pieces, strict=True)):
            view.copy_(buffer)
            layer.fill_(number // 2)
            norm._buffers[name] = view.view(buffer.shape).data  # with a count of its own of what is written to it
        for number, norm in enumerate(norms):
            if isinstance(norm, BATCH_NORM):
                norm._buffers["num_batches_tracked"] = self._counts[number]
            else:  # instance norm does not count its calls
                norm.register_forward_pre_hook(partial(self._count, number))
        self._settings: list[tuple[bool, float | None]] = []
        # the values before the step: always in the same memory, as a captured CUDA graph reads it
        self._start, self._start_counts = self._values.double(), self._counts.double()
        self._zeroed = self._values.clone()

    def _use_rows(self, found: list[tuple[Any, str]], layout: Layout, num_together: int) -> None:
        """Makes the statistics those of several shards at once."""
        self._values, self._counts = (each.repeat(num_together, 1) for each in (self._values, self._counts))
        views = self._values.split(layout.pieces, dim=1)[::2]
        for (norm, name), view in zip(found, views, strict=True):
            norm._buffers[name] = StackedTensor(view.view(num_together, *norm._buffers[name].shape))
        for number, norm in enumerate(self.norms):
            if not isinstance(norm, BATCH_NORM):
                raise CannotStack("instance norm")
            norm._buffers["num_batches_tracked"] = StackedTensor(self._counts[:, number])

    def _count(self, number: int, norm: nn.Module, inputs: Any) -> None:
        self._counts[number].add_(int(norm.training))

    def start_step(self) -> None:
        """Saves what all shards start from. A layer in eval mode uses its statistics: they stay."""
        if not self.norms:
            return
        settings = [(norm.training, norm.momentum) for norm in self.norms]
        if settings != self._settings:  # usually once in a run
            self._settings = settings

            def per_entry(values: list[Any]) -> Tensor:
                return torch.tensor(values, dtype=torch.float64, device=self._values.device)[self._layer]

            cumulative = [isinstance(norm, BATCH_NORM) and norm.momentum is None for norm in self.norms]
            self._is_active = per_entry([training for training, _ in settings]).bool()
            self._is_cumulative = per_entry(cumulative).bool()
            self._keep = per_entry([1.0 - (momentum or 0.0) for _, momentum in settings])
        self._start.copy_(self._values)
        self._start_counts.copy_(self._counts)
        self._zeroed.copy_(torch.where(self._is_active, 0.0, self._values))

    def follow(self, other: "RunningStats") -> None:
        """From now on, starts every step from the values of `other`."""
        if self.norms:
            self._start, self._start_counts, self._zeroed = other._start, other._start_counts, other._zeroed

    def start_shard(self) -> None:
        """Sets zero where the layer will add its own statistics, the values before the step elsewhere."""
        if self.norms and not self._is_sync:
            self._values.copy_(self._zeroed)
            self._counts.copy_(self._start_counts)

    def rewind(self) -> None:
        """Resets the statistics to the start of an unfinished step."""
        if self.norms:
            self._values.copy_(self._start)
            self._counts.copy_(self._start_counts)

    def tensors(self) -> list[Tensor]:
        """What the layers write to."""
        return [self._values, self._counts] if self.norms else []

    def update(self) -> Tensor:
        """The statistics of the shard that was just computed, and how often each layer was called: one vector.

        For several shards, a row for each.
        """
        return torch.cat([self._values.double(), self._counts.double() - self._start_counts], dim=-1)

    def merge(self, updates: list[Tensor]) -> None:
        """Sets the statistics after the step, from the updates of all shards in shard order."""
        merged, counts, before = self._start, self._start_counts, self._start_counts[self._layer]
        found = [update.split([len(self._values), len(self._counts)]) for update in updates]
        if self._is_sync:  # all updates are equal, and a rank without shards needs them too
            stats, calls = found[0]
            self._values.copy_(stats)
            self._counts.copy_(counts + calls)
            return
        for stats, calls in found:
            times, so_far = calls[self._layer], counts[self._layer]
            mean_of_all = (so_far * merged + (before + times) * stats) / (so_far + times).clamp(min=1)  # no momentum
            after = torch.where(self._is_cumulative, mean_of_all, merged * self._keep**times + stats)
            merged = torch.where(self._is_active, after, merged)
            counts = counts + calls
        self._values.copy_(merged)
        self._counts.copy_(counts)
