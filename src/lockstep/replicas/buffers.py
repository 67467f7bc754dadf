"""What the shards of a batch make of a module's buffers, merged in shard order: whoever computed them.

Every shard starts from the buffers as they were before the step.
- Running statistics of batch norm end as if the shards had come one after the other, as in a plain loop over them.
- Integers are counters: what each shard added is added up. Booleans: true, if they are so in one shard.
- Floats become the mean over the shards, weighted by their samples; where all agree, they stay to the bit.
"""

import torch
from torch import Tensor, nn

from lockstep.core.errors import RunError
from lockstep.replicas.running_stats import RunningStats, has_running_stats, norms_of

NUM_COMPARED = 8  # shards after which a buffer is compared with its start, as it may be written to through `.data`
BufferUpdates = dict[str, Tensor]  # the buffers that a shard changed, by name; "" are all norm layers' running stats


class Buffers:
    """The buffers of one replica's module. With `sync_batch_norm`, its statistics are those of the whole batch."""

    def __init__(self, module: nn.Module, sync_batch_norm: bool) -> None:
        self._is_sync = sync_batch_norm
        self._stats = RunningStats(norms_of(module), sync_batch_norm)
        found = [
            (f"{prefix}.{short}" if prefix else short, owner, short)
            for prefix, owner in module.named_modules()
            for short in owner._buffers
            if not has_running_stats(owner)
        ]
        self._others = {name: BufferTracker(owner, at) for name, owner, at in found if owner._buffers[at] is not None}
        self._unset = [(name, owner, at) for name, owner, at in found if owner._buffers[at] is None]

    def follow(self, other: "Buffers") -> None:
        """Starts every step from where those of `other` are."""
        self._stats.follow(other._stats)

    def stop_comparing(self) -> None:
        """Buffers are not compared any more: that has to wait for the device."""
        for buffer in self._others.values():
            buffer.stop_comparing()

    def start_step(self) -> None:
        """Remembers what all shards start from."""
        self._stats.start_step()

    def start_shard(self) -> None:
        """Puts the buffers back to where the step began."""
        self._stats.start_shard()
        self.restore()

    def restore(self) -> None:
        """Puts back all buffers that are not a norm layer's."""
        for other in self._others.values():
            other.restore()

    def rewind(self) -> None:
        """Makes all of them what they were before the step that is under way."""
        self._stats.rewind()
        self.restore()

    def updates(self) -> BufferUpdates:
        """What the shard that has just been computed made of them."""
        for name, owner, short in self._unset:
            if owner._buffers[short] is not None:
                raise RunError(
                    f"The buffer {name} was None, and the model sets it in its forward pass: shards cannot be merged "
                    f"into what was not there. Register it with a tensor."
                )
        found = {name: other.changed_to() for name, other in self._others.items() if other.is_changed()}
        if found and self._is_sync:  # the shards went through the model together: nobody knows whose these are
            raise RunError(
                f"The model changes its buffer {next(iter(found))}, which goes with statistics of a shard only: use "
                f"--batch-norm shard."
            )
        if self._stats.norms:
            found[""] = self._stats.update()
        return found

    def merge(self, updates: list[BufferUpdates], sizes: list[int]) -> None:
        """The buffers after the step, from the updates of all shards in their order."""
        if self._stats.norms:
            self._stats.merge([of_shard[""] for of_shard in updates])
        for name in dict.fromkeys(name for of_shard in updates for name in of_shard if name):
            self._others[name].merge([of_shard.get(name) for of_shard in updates], sizes)


class BufferTracker:
    """A buffer that is not a norm layer's."""

    def __init__(self, owner: nn.Module, short: str) -> None:
        self._owner, self._short = owner, short
        self._tensor: Tensor = owner._buffers[short]
        self._start = self._tensor.clone()
        self._version = self._tensor._version
        self._num_compared = 0
        self._is_hidden = False  # written to in a way that PyTorch does not count, through `.data`

    def is_changed(self) -> bool:
        """Whether the module wrote to it, or put another in its place."""
        if self._owner._buffers[self._short] is not self._tensor or self._tensor._version != self._version:
            return True
        if not self._is_hidden and self._num_compared < NUM_COMPARED:  # comparing has a cost: only for the first shards
            self._num_compared += 1
            self._is_hidden = not torch.equal(self._tensor, self._start)
        return self._is_hidden

    def stop_comparing(self) -> None:
        """As if it had been compared often enough."""
        self._num_compared = NUM_COMPARED

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
        is_number = self._start.is_floating_point() or self._start.is_complex()
        start = self._start if self._start.is_complex() else self._start.to(torch.float64 if is_number else torch.int64)
        merged, num_samples = start, 0
        for value, size in zip(values, sizes, strict=True):
            end, num_samples = start if value is None else value.to(start.dtype), num_samples + size
            if is_number and num_samples == size:
                merged = end
            elif is_number:  # a mean; where both are the same, also infinite, there is nothing to do
                merged = torch.where(merged == end, merged, torch.lerp(merged, end, size / num_samples))
            else:
                merged = merged + (end - start)
        self._start.copy_(merged != 0 if self._start.dtype == torch.bool else merged)
        self._set(self._start)

    def _set(self, value: Tensor) -> None:
        with torch.no_grad():
            self._tensor.copy_(value)
        self._owner._buffers[self._short] = self._tensor
        self._version = self._tensor._version
