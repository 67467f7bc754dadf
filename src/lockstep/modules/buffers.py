"""What the shards of a batch make of a module's buffers, merged in shard order: whoever computed them.

Every shard starts from the buffers as they were before the step.
- Running statistics of batch norm end as if the shards had come one after the other, as in a plain loop over them.
- Whole numbers are counters: what each shard added is added up. Yes and no: yes, if one shard says so.
- Other numbers become the mean over the shards, weighted by their samples; where all agree, they stay to the bit.
"""

import torch
from torch import Tensor, nn

from lockstep.errors import RunError
from lockstep.modules.statistics import Statistics, keeps_statistics, norms_of

Row = dict[str, Tensor]  # the buffers that a shard changed, by name; "" are the statistics of all norm layers


class Buffers:
    """The buffers of one replica's module. With `is_sync`, statistics of batch norm are somebody else's."""

    def __init__(self, module: nn.Module, is_sync: bool) -> None:
        self._is_sync = is_sync
        self._statistics = Statistics([] if is_sync else norms_of(module))
        self._others = {
            f"{prefix}.{short}" if prefix else short: Other(owner, short)
            for prefix, owner in module.named_modules()
            for short, buffer in owner._buffers.items()
            if buffer is not None and not keeps_statistics(owner)
        }

    def start_step(self) -> None:
        """Remembers what all shards start from."""
        self._statistics.start_step()

    def start_shard(self) -> None:
        """Puts the buffers back to where the step began."""
        self._statistics.start_shard()
        for other in self._others.values():
            other.restore()

    def row(self) -> Row | None:
        """What the shard that has just been computed made of them."""
        row = {name: other.changed_to() for name, other in self._others.items() if other.is_changed()}
        if row and self._is_sync:  # the shards went through the model together: nobody knows whose these are
            raise RunError(
                f"The model changes its buffer {next(iter(row))}, which goes with statistics of a shard only: use "
                f"--batch-norm shard."
            )
        if self._statistics.norms:
            row[""] = self._statistics.row()
        return row or None

    def merge(self, rows: list[Row], sizes: list[int]) -> None:
        """The buffers after the step, from the rows of all shards in their order."""
        if self._statistics.norms:
            self._statistics.merge([row[""] for row in rows])
        for name in dict.fromkeys(name for row in rows for name in row if name):
            self._others[name].merge([row.get(name) for row in rows], sizes)


class Other:
    """A buffer that is not a norm layer's."""

    def __init__(self, owner: nn.Module, short: str) -> None:
        self._owner, self._short = owner, short
        self._tensor: Tensor = owner._buffers[short]
        self._start = self._tensor.clone()
        self._version = self._tensor._version

    def is_changed(self) -> bool:
        """Whether the module wrote to it, or put another in its place."""
        return self._owner._buffers[self._short] is not self._tensor or self._tensor._version != self._version

    def changed_to(self) -> Tensor:
        """A copy of what it is now."""
        now = self._owner._buffers[self._short]
        if not isinstance(now, Tensor) or now.shape != self._start.shape or now.dtype != self._start.dtype:
            raise RunError(
                f"The buffer {self._short} of {type(self._owner).__name__} changed its shape or kind in a step, from "
                f"{self._start.dtype} of shape {tuple(self._start.shape)}: it cannot be merged over the shards."
            )
        return now.detach().clone()

    def restore(self) -> None:
        """Makes it what it was before the step."""
        if self.is_changed():
            self._set(self._start)

    def merge(self, values: list[Tensor | None], sizes: list[int]) -> None:
        """What it is after the step; None where a shard left it alone."""
        start, merged, num_samples = self._start.double(), self._start.double(), 0
        for value, size in zip(values, sizes, strict=True):
            end, num_samples = start if value is None else value.double(), num_samples + size
            if self._start.is_floating_point():
                merged = torch.lerp(merged, end, size / num_samples)
            else:
                merged = merged + (end - start)
        self._start.copy_(merged != 0 if self._start.dtype == torch.bool else merged)
        self._set(self._start)

    def _set(self, value: Tensor) -> None:
        with torch.no_grad():
            self._tensor.copy_(value)
        self._owner._buffers[self._short] = self._tensor
        self._version = self._tensor._version
