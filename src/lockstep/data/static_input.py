"""Loaded samples in GPU memory that stays in place, where a captured CUDA graph reads them.

A batch is copied from pinned memory to a staging buffer on a stream of its own, while the GPU computes an earlier one;
what is left to do before a step is a copy within the GPU's memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import CaptureError
from lockstep.data.batch import StaticBatch
from lockstep.data.dataset import leaves_of, map_leaves

NUM_STAGES = 2

LoadShard = Callable[[int, int], Any]  # (start, stop) -> the samples of a shard, in the CPU's memory


def static_batch(static: "StaticInput", load: LoadShard) -> StaticBatch:
    """A batch whose shards `load` gives, in the memory of `static`."""
    return StaticBatch(
        fill=lambda: static.fill(static.stage(load)),
        gather=lambda: None,
        fetch=lambda _, start, stop: static.fetch(load, start, stop),
    )


class Stage:
    """A staging buffer: what the copy stream writes, and when it may do so again."""

    def __init__(self) -> None:
        self.tensors: dict[int, list[Tensor]] = {}  # by the start of the shard
        self.is_free: torch.cuda.Event | None = None
        self.is_full: torch.cuda.Event | None = None


class StaticInput:
    """The samples of one rank, for one size of batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._static: dict[tuple[int, int], Any] = {}  # (start, stop) of a shard ->
        self._stages, self._next = [Stage() for _ in range(NUM_STAGES)], 0

    def fetch(self, load: LoadShard, start: int, stop: int) -> tuple[Any, Any]:
        """The static tensors of a shard; they are allocated at the first use, and filled from then on."""
        if (start, stop) not in self._static:
            self._static[start, stop] = map_leaves(load(start, stop), self._put)
        static = self._static[start, stop]
        return (static, static) if isinstance(static, dict) else static

    def stage(self, load: LoadShard) -> Stage:
        """Starts to copy the shards that are in use to the GPU."""
        stage = self._stages[self._next % NUM_STAGES]
        self._next += 1
        with torch.cuda.stream(self._copies):
            if stage.is_free is not None and self._copies is not None:
                self._copies.wait_event(stage.is_free)
            for (start, stop), static in self._static.items():
                loaded, targets = leaves_of(load(start, stop)), leaves_of(static)
                if [tuple(tensor.shape) for tensor in loaded] != [tuple(tensor.shape) for tensor in targets]:
                    raise CaptureError("samples have different shapes from batch to batch")
                if start not in stage.tensors:
                    stage.tensors[start] = [torch.empty_like(target) for target in targets]
                for staged, tensor in zip(stage.tensors[start], loaded, strict=True):
                    staged.copy_(tensor, non_blocking=True)
            stage.is_full = self._copies.record_event() if self._copies is not None else None
        return stage

    def fill(self, stage: Stage) -> None:
        """Copies a staged batch to the static tensors, on the current stream."""
        if stage.is_full is not None:
            torch.cuda.current_stream(self._device).wait_event(stage.is_full)
        for (start, _), static in self._static.items():
            if start in stage.tensors:
                torch._foreach_copy_(leaves_of(static), stage.tensors[start])
        if stage.is_full is not None:
            stage.is_free = torch.cuda.current_stream(self._device).record_event()

    def _put(self, tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise CaptureError("a batch holds more than tensors")
        dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype  # as with arrays
        return tensor.to(self._device, dtype, copy=True)
