"""A module's buffers after a step: what the shards of the batch made of them, merged in shard order.

Every shard starts from the buffers as they were before the step.
- Running statistics of norm layers end as if the shards had come one after the other, as in a plain loop over them.
- Integers are counters: what each shard added is added up. Booleans become true if they are in any shard.
- Floats become the mean over the shards, weighted by their samples; where all agree, they keep their bits.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import RunError
from lockstep.replicas.running_stats import RunningStats, has_running_stats

NUM_COMPARED = 8  # shards after which a buffer is compared with its start, as it may be written to through `.data`
BufferUpdates = dict[str, Tensor]  # the buffers that a shard changed, by name; "" are all norm layers' running stats


class Buffers:
    """The buffers of one replica's module. With `sync_batch_norm`, its statistics are those of the whole batch.

    With `num_together`, so many shards are in the module at once.
    """

    def __init__(self, module: nn.Module, sync_batch_norm: bool, num_together: int = 0) -> None:
        self._is_sync = sync_batch_norm
        norms = [layer for layer in module.modules() if has_running_stats(layer)]
        self.stats = RunningStats(norms, sync_batch_norm, num_together)
        found = [
            (f"{prefix}.{short}" if prefix else short, owner, short)
            for prefix, owner in module.named_modules()
            for short in owner._buffers
            if not has_running_stats(owner)
        ]
        self._others = {name: BufferTracker(owner, at) for name, owner, at in found if owner._buffers[at] is not None}
        self._unset = [(name, owner, at) for name, owner, at in found if owner._buffers[at] is None]

    def saved_as_copies(self) -> AbstractContextManager[Any]:
        """Within it, the backward pass gets copies of the buffers: they may be written to before it."""
        written = [*self.stats.tensors(), *(tracker.tensor for tracker in self._others.values())]
        if not written:
            return nullcontext()
        memories = {tensor.untyped_storage()._cdata for tensor in written if tensor.layout == torch.strided}

        def saved(tensor: Tensor) -> Tensor:
            is_strided = tensor.layout == torch.strided
            # detached: else a graph that is kept would hold its own outputs, and never be freed
            return tensor.clone() if is_strided and tensor.untyped_storage()._cdata in memories else tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor)

    def stop_comparing(self) -> None:
        """Buffers are not compared any more: a comparison waits for the device."""
        for tracker in self._others.values():
            tracker.num_compared = NUM_COMPARED

    def start_step(self) -> None:
        """Saves what all shards start from."""
        self.restore()
        self.stats.start_step()

    def start_shard(self) -> None:
        """Resets the buffers to the start of the step."""
        self.stats.start_shard()
        self.restore()

    def restore(self) -> None:
        """Resets all buffers but those of norm layers to the start of the step."""
        for tracker in self._others.values():
            if tracker.is_changed():
                tracker.restore()

    def keep(self) -> None:
        """What was written to the buffers between steps stays."""
        for tracker in self._others.values():
            tracker.keep()

    def rewind(self) -> None:
        """Resets all of them to the start of an unfinished step."""
        self.stats.rewind()
        self.restore()

    def updates(self) -> BufferUpdates:
        """What the shard that was just computed made of them."""
        for name, owner, short in self._unset:
            if owner._buffers[short] is not None:
                raise RunError(
                    f"The buffer {name} was None, and the model sets it in its forward pass. Register it with a tensor."
                )
        found = {name: tracker.value() for name, tracker in self._others.items() if tracker.is_changed()}
        if found and self._is_sync:  # all shards are in the model at once: it is not known which of them wrote
            raise RunError(f"The model changes its buffer {next(iter(found))}, which needs --batch-norm shard.")
        if self.stats.norms:
            found[""] = self.stats.update()
        return found

    def merge(self, updates: list[BufferUpdates], sizes: list[int]) -> None:
        """Sets the buffers after the step, from the updates of all shards in shard order."""
        if self.stats.norms:
            self.stats.merge([of_shard[""] for of_shard in updates])
        for name in dict.fromkeys(name for of_shard in updates for name in of_shard if name):
            self._others[name].merge([of_shard.get(name) for of_shard in updates], sizes)


class BufferTracker:
    """A buffer that is not a norm layer's."""

    def __init__(self, owner: nn.Module, short: str) -> None:
        self._owner, self._short = owner, short
        self.tensor: Tensor = owner._buffers[short]
        self._start = self.tensor.clone()
        self._version = self.tensor._version
        self.num_compared = 0
        self._is_hidden = False  # written to in a way that PyTorch does not count, through `.data`

    def is_changed(self) -> bool:
        """Whether the module wrote to the buffer, or replaced it."""
        if self._owner._buffers[self._short] is not self.tensor or self.tensor._version != self._version:
            return True
        if not self._is_hidden and self.num_compared < NUM_COMPARED:  # for the first shards only, as it has a cost
            self.num_compared += 1
            self._is_hidden = not torch.equal(self.tensor, self._start)
        return self._is_hidden

    def value(self) -> Tensor:
        """A copy of the buffer as it is now."""
        now = self._owner._buffers[self._short]
        if not isinstance(now, Tensor) or now.shape != self._start.shape or now.dtype != self._start.dtype:
            raise RunError(
                f"The buffer {self._short} of {type(self._owner).__name__} changed its shape or dtype in a step, from "
                f"{self._start.dtype} of shape {tuple(self._start.shape)}: shards cannot be merged. Keep both the same."
            )
        return now.detach().clone()

    def restore(self) -> None:
        """Sets the buffer to its value at the start of the step."""
        with torch.no_grad():
            self.tensor.copy_(self._start)
        self._owner._buffers[self._short] = self.tensor
        self._version = self.tensor._version

    def keep(self) -> None:
        """The buffer as it is now is what the next step starts from."""
        self._start.copy_(self.value())  # the same memory: a captured CUDA graph reads it
        self.restore()

    def _check_no_queue(self, values: list[Tensor | None]) -> None:
        """Refuses a buffer in which shards write different things to the same place, and leave the rest as it was."""
        written = [value for value in values if value is not None]
        if self._start.numel() < 2 or len(written) < 2 or torch.equal(written[0], written[1]):
            return
        is_same = written[0] == self._start
        if bool(is_same.any()) and not bool(is_same.all()) and torch.equal(is_same, written[1] == self._start):
            raise RunError(
                f"Shards write to the same part of buffer {self._short} of {type(self._owner).__name__} (a queue?), "
                f"and only one could stay. Give what it holds to the loss from outside, after each step, "
                f"or use a loss over the whole batch (over='batch')."
            )

    def merge(self, values: list[Tensor | None], sizes: list[int]) -> None:
        """Sets the buffer after the step, from its value in each shard; None where a shard did not change it."""
        is_number = self._start.is_floating_point() or self._start.is_complex()
        self._check_no_queue(values)
        if self._start.dtype == torch.bool:
            ends = [self._start if value is None else value for value in values]
            self._start.copy_(torch.stack(ends).any(0))
            self.restore()
            return
        start = self._start if self._start.is_complex() else self._start.to(torch.float64 if is_number else torch.int64)
        merged, num_samples = start, 0
        for value, size in zip(values, sizes, strict=True):
            end, num_samples = start if value is None else value.to(start.dtype), num_samples + size
            if is_number and num_samples == size:
                merged = end
            elif is_number:  # a mean; where both are equal, infinities too, there is nothing to do
                merged = torch.where(merged == end, merged, torch.lerp(merged, end, size / num_samples))
            else:
                merged = merged + (end - start)
        self._start.copy_(merged)
        self.restore()
