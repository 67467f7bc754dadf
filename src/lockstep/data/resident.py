"""Samples that stay on the devices: a batch is a list of sample numbers, and a shard is gathered where it is needed."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lockstep.backends import Tensor
from lockstep.core.layout import Array
from lockstep.data.batch import Batch, DeviceMemory, Split, StaticBatch
from lockstep.data.dataset import leaves_of, map_leaves

ALIGNMENT = 256  # bytes: no kernel needs more
MAX_FLOAT_BYTES = 1 << 30
GATHERED_BYTES = 16 << 20  # of a batch: more are gathered shard by shard, so that they are not all there twice


class ResidentData:
    """Samples copied once to each device."""

    in_memory = True

    def __init__(self, memory: DeviceMemory, X: Any, y: Any) -> None:
        self._memory, self.num_samples = memory, len(leaves_of(X)[0])
        self._take = memory.backend.take
        if memory.devices[0].kind == "cuda":  # one kernel less for every shard
            X = map_leaves(X, as_floats)
        self._static: dict[tuple[int, int], StaticSamples] = {}  # number of the local rank, size of the batch ->
        placed = {id(array): memory.copy_to_devices(array) for array in leaves_of((X, y))}
        self._sample_bytes = {
            id(tensor): bytes_of_sample(array) for array in leaves_of((X, y)) for tensor in placed[id(array)]
        }

        def of_rank(number: int) -> Any:
            return map_leaves((X, y), lambda array: placed[id(array)][number])

        self._of_rank = [of_rank(number) for number in range(len(memory.local_ranks))]

    def batches(self, order: Array, batch_size: int, split: Split, epoch: int = 0) -> Iterator[Batch]:
        orders = self._memory.copy_to_devices(order)
        for first in range(0, len(order), batch_size):
            size = min(batch_size, len(order) - first)
            yield Batch(size, partial(self._fetch, orders, first), partial(self._static_batch, orders, first, size))

    def _fetch(self, orders: list[Tensor], first: int, rank: int, start: int, stop: int) -> tuple[Any, Any]:
        number = self._memory.local_ranks.index(rank)
        own = self._memory.backend.chunk(orders[number], first + start, first + stop)
        X, y = map_leaves(self._of_rank[number], lambda tensor: self._take(tensor, own, 0, stop - start))
        return X, y

    def _static_batch(self, orders: list[Tensor], first: int, size: int, rank: int) -> StaticBatch:
        """The batch in static memory, which is allocated at the first use."""
        backend, number = self._memory.backend, self._memory.local_ranks.index(rank)

        def samples() -> StaticSamples:
            if (number, size) not in self._static:
                self._static[number, size] = StaticSamples(self, number, size)
            return self._static[number, size]

        return StaticBatch(
            fill=lambda: backend.assign(samples().numbers, backend.chunk(orders[number], first, first + size)),
            gather=lambda: samples().gather(),
            fetch=lambda rank, start, stop: samples().fetch(start, stop),
        )

    def close(self) -> None:
        """Nothing was started."""


class StaticSamples:
    """The samples of a batch of one size, gathered by sample numbers in memory that stays in place."""

    def __init__(self, data: ResidentData, number: int, size: int) -> None:
        self._backend, self._take = data._memory.backend, data._take
        self._data, self._sample_bytes = data._of_rank[number], data._sample_bytes
        device = data._memory.devices[data._memory.local_ranks[number]]
        self.numbers = self._backend.from_numpy(np.zeros(size, np.int64), device)
        self._gathered: dict[int, Tensor] = {}  # by the id of the data that they are from

    def gather(self) -> None:
        """Gathers all samples of the batch at once, where they are small."""
        size = len(self.numbers)
        small = [data for data in leaves_of(self._data) if size * self._sample_bytes[id(data)] <= GATHERED_BYTES]
        self._gathered = {id(data): self._take(data, self.numbers, 0, size) for data in small}

    def fetch(self, start: int, stop: int) -> tuple[Any, Any]:
        """Some of the samples. Unaligned slices are gathered again: kernels might give other bits for them."""

        def cut(data: Tensor) -> Tensor:
            if id(data) in self._gathered and start * self._sample_bytes[id(data)] % ALIGNMENT == 0:
                return self._backend.chunk(self._gathered[id(data)], start, stop)
            return self._take(data, self._backend.chunk(self.numbers, start, stop), 0, stop - start)

        X, y = map_leaves(self._data, cut)
        return X, y


def as_floats(array: Array) -> Array:
    """Bytes as the floats that a model gets, unless they would take much memory."""
    if array.dtype != np.uint8 or 4 * array.nbytes > MAX_FLOAT_BYTES:
        return array
    return array.astype(np.float32) / np.float32(255)


def bytes_of_sample(array: Array) -> int:
    """The size of one sample on a device, where bytes have become floats."""
    return int(np.prod(array.shape[1:], dtype=np.int64)) * (4 if array.dtype == np.uint8 else array.dtype.itemsize)
