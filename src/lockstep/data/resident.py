"""Samples that stay on the devices: a batch is a list of sample numbers, and a shard is gathered where it is needed."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lockstep.backends import Tensor
from lockstep.core.layout import Array
from lockstep.data.batch import Batch, DeviceMemory, Split, StaticBatch
from lockstep.data.dataset import leaves_of, map_leaves

ALIGNED = 256  # bytes: no kernel asks for more


class ResidentData:
    """Samples placed once on each device."""

    in_memory = True

    def __init__(self, memory: DeviceMemory, X: Any, y: Any, compiles: bool = False) -> None:
        self._memory, self.num_samples = memory, len(leaves_of(X)[0])
        self._take = memory.backend.compile(memory.backend.take) if compiles else memory.backend.take
        self._static: dict[int, StaticSamples] = {}  # by the size of the batch
        placed = {id(array): memory.place(array) for array in leaves_of((X, y))}
        self._sample_bytes = {id(placed[id(array)][0]): bytes_of_sample(array) for array in leaves_of((X, y))}
        self._of_rank = [
            map_leaves((X, y), partial(_of_rank, placed, number)) for number in range(len(memory.local_ranks))
        ]

    def batches(self, order: Array, batch_size: int, split: Split, epoch: int = 0) -> Iterator[Batch]:
        orders = self._memory.place(order)
        for first in range(0, len(order), batch_size):
            size = min(batch_size, len(order) - first)

            def fetch(rank: int, start: int, stop: int, first: int = first) -> tuple[Any, Any]:
                number = self._memory.local_ranks.index(rank)
                own = self._memory.backend.chunk(orders[number], first + start, first + stop)
                X, y = map_leaves(self._of_rank[number], lambda tensor: self._take(tensor, own, 0, stop - start))
                return X, y

            def fill(first: int = first, size: int = size) -> None:
                self._static_samples(size).fill(self._memory.backend.chunk(orders[0], first, first + size))

            def gather(size: int = size) -> None:
                self._static_samples(size).gather()

            def fetch_static(rank: int, start: int, stop: int, size: int = size) -> tuple[Any, Any]:
                return self._static_samples(size).fetch(start, stop)

            yield Batch(size, fetch, StaticBatch(fill, gather, fetch_static))

    def _static_samples(self, size: int) -> "StaticSamples":
        if size not in self._static:
            self._static[size] = StaticSamples(self, size)
        return self._static[size]

    def close(self) -> None:
        """Nothing was started."""


class StaticSamples:
    """The samples of a batch of one size, gathered from sample numbers in memory that stays in place."""

    def __init__(self, data: ResidentData, size: int) -> None:
        self._backend, self._take = data._memory.backend, data._take
        self._data, self._sample_bytes = data._of_rank[0], data._sample_bytes
        self._numbers = data._memory.place(np.zeros(size, np.int64))[0]
        self._gathered: dict[int, Tensor] = {}  # by what they are from

    def fill(self, numbers: Tensor) -> None:
        """Sets the numbers of the samples."""
        self._backend.assign(self._numbers, numbers)

    def gather(self) -> None:
        """Gathers all samples of the batch at once."""
        size = len(self._numbers)
        self._gathered = {id(data): self._take(data, self._numbers, 0, size) for data in leaves_of(self._data)}

    def fetch(self, start: int, stop: int) -> tuple[Any, Any]:
        """Some of the gathered samples; gathered once more where a slice would be aligned otherwise than a new tensor.

        A kernel may be another one for memory that is not aligned.
        """

        def cut(data: Tensor) -> Tensor:
            if start * self._sample_bytes[id(data)] % ALIGNED == 0:
                return self._backend.chunk(self._gathered[id(data)], start, stop)
            return self._take(data, self._backend.chunk(self._numbers, start, stop), 0, stop - start)

        X, y = map_leaves(self._data, cut)
        return X, y


def bytes_of_sample(array: Array) -> int:
    """What one sample takes on a device, where bytes have become floats."""
    return int(np.prod(array.shape[1:], dtype=np.int64)) * (4 if array.dtype == np.uint8 else array.dtype.itemsize)


def _of_rank(placed: dict[int, list[Tensor]], number: int, array: Array) -> Tensor:
    return placed[id(array)][number]
