"""A batch that a program gives: tensors, arrays, tuples and dicts of them, cut into shards."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.backends.torch import torch_device
from lockstep.core.errors import DataError
from lockstep.data.batch import Batch, DeviceMemory, StaticBatch
from lockstep.data.dataset import leaves_of, pair_of
from lockstep.data.static_input import LoadShard, StaticInput, static_batch

FORMS = "Give (inputs, target), (input, ..., target), or a dict with the model's arguments by name"


class GivenBatches:
    """Batches for the ranks of this process, whose devices are in `memory`."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._static: dict[tuple[int, int], StaticInput] = {}  # rank, size of the batch ->

    def batch(self, given: Any) -> Batch:
        """The batch, of which a rank gets shards. A dict is the model's input by name, and what the loss sees too."""
        X, y = _inputs_and_target(given)
        parts = X if X is y else (y, X)
        tensors = _tensors(parts)
        num_samples = _num_samples(tensors)

        def load(device: torch.device | None, start: int, stop: int) -> tuple[Any, Any]:
            inputs = _cut(X, device, num_samples, range(start, stop))
            return inputs, inputs if X is y else _cut(y, device, num_samples, range(start, stop))

        def fetch(rank: int, start: int, stop: int) -> tuple[Any, Any]:
            return load(torch_device(self._memory.devices[rank]), start, stop)

        has_only_tensors = len(tensors) == len(leaves_of(parts))
        static = partial(self._static_batch, num_samples, partial(load, None)) if has_only_tensors else None
        return Batch(num_samples, fetch, static)

    def _static_batch(self, size: int, load: LoadShard, rank: int) -> StaticBatch:
        if (rank, size) not in self._static:
            self._static[rank, size] = StaticInput(torch_device(self._memory.devices[rank]))
        return static_batch(self._static[rank, size], load)


def inputs_of(given: Any, num_samples: int = 2) -> Any:
    """The model's inputs for the first samples of a batch, on the CPU."""
    X, _ = _inputs_and_target(given)
    num_given = _num_samples(_tensors(X))
    return _cut(X, torch.device("cpu"), num_given, range(min(num_samples, num_given)))


def _inputs_and_target(given: Any) -> tuple[Any, Any]:
    if isinstance(given, Mapping):
        return (plain := dict(given)), plain
    if (found := pair_of(given)) is None:
        raise DataError(f"The batch is a {type(given).__name__}. {FORMS}.")
    return found


def _num_samples(tensors: list[Any]) -> int:
    sizes = [len(tensor) for tensor in tensors if tensor.ndim]
    if not sizes:
        raise DataError(f"The batch has no tensor with samples. {FORMS}.")
    if not sizes[0]:
        raise DataError("The batch is empty. Give one sample at least.")
    if wrong := [size for size in sizes if size != sizes[0]]:
        raise DataError(f"The batch has tensors of {sizes[0]} and of {wrong[0]} samples. All need the same number.")
    return sizes[0]


def _tensors(value: Any) -> list[Any]:
    """The tensors and arrays inside."""
    if isinstance(value, (Tensor, np.ndarray)):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in _tensors(part)]
    return [leaf for part in value for leaf in _tensors(part)] if isinstance(value, (tuple, list)) else []


def _cut(value: Any, device: torch.device | None, num_samples: int, samples: range) -> Any:
    """Some samples of a part of the batch, copied to `device`; lists are cut too, what is no list is for all."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        dtype = torch.float32 if value.dtype == torch.float64 else value.dtype  # as with arrays
        part = value[samples.start : samples.stop] if value.ndim else value
        return part.detach() if device is None else part.detach().to(device, dtype, copy=True)
    cut = partial(_cut, device=device, num_samples=num_samples, samples=samples)
    if isinstance(value, Mapping):
        return {name: cut(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        if len(value) == num_samples and not _tensors(value):  # like strings, one for each sample
            return value[samples.start : samples.stop]
        parts = [cut(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
