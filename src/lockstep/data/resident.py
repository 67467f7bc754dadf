"""Samples within reach of every rank, and batches of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from lockstep.backends import Tensor
from lockstep.data.dataset import leaves_of, map_leaves
from lockstep.runtime import Batch, Engine
from lockstep.core.errors import RunError
from lockstep.core.layout import Array

ALIGNED = 256  # bytes: no kernel asks for more
Split = Callable[[int], list[range]]  # samples of a batch -> its shards


class Feed(Protocol):
    """Where batches come from."""

    num_samples: int
    in_memory: bool  # a batch may be as large as all samples: nothing is loaded before it is fetched

    def batches(self, order: Array, batch_size: int, split: Split, epoch: int) -> Iterator[Batch]:
        """The samples in `order`, in batches; a rank will fetch the shards that `split` makes of each."""
        ...

    def close(self) -> None:
        """Ends what was started to load samples."""
        ...


@contextmanager
def lost_loaders() -> Iterator[None]:
    """Says in a sentence that a process which loads samples has died: the news may come at any line of this thread."""
    try:
        yield
    except RuntimeError as problem:
        if "DataLoader worker" not in str(problem):
            raise
        said = str(problem).partition(". ")[0]
        raise RunError(
            f"The data cannot be loaded: {said}. It was killed, ended itself, or ran out of memory: use fewer "
            f"processes (--workers), or none to see more (--workers 0)."
        ) from problem


class Samples:
    """Placed once on each device; a batch is then a list of sample numbers, and a shard is gathered where needed."""

    in_memory = True

    def __init__(self, engine: Engine, X: Any, y: Any, compiles: bool = False) -> None:
        self._engine, self.num_samples = engine, len(leaves_of(X)[0])
        self._take = engine.backend.capture(engine.backend.take) if compiles else engine.backend.take
        self._windows: dict[int, list[Tensor]] = {}
        self._whole: dict[int, Tensor] = {}  # samples of the batch that is being recorded, by what they are from
        placed = {id(array): engine.place(array) for array in leaves_of((X, y))}
        self._bytes = {id(placed[id(array)][0]): bytes_of_sample(array) for array in leaves_of((X, y))}
        self._of_rank = [
            map_leaves((X, y), partial(_of_rank, placed, number)) for number in range(len(engine.local_ranks))
        ]

    def batches(self, order: Array, batch_size: int, split: Split, epoch: int = 0) -> Iterator[Batch]:
        backend, places = self._engine.backend, self._engine.place(order)
        for first in range(0, len(order), batch_size):
            size = min(batch_size, len(order) - first)

            def refill(first: int = first, size: int = size) -> None:
                """Puts the numbers of the batch's samples where a recording looks for them."""
                backend.assign(self._window(size)[0], backend.chunk(places[0], first, first + size))

            def fetch(rank: int, start: int, stop: int, first: int = first, size: int = size) -> tuple[Any, Any]:
                number = self._engine.local_ranks.index(rank)
                if self._engine.is_recording:
                    return self._cut(size, start, stop)
                return self._gathered(number, places[number], first + start, first + stop)

            def gather(size: int = size) -> None:
                window = self._window(size)[0]
                self._whole = {id(data): self._take(data, window, 0, size) for data in leaves_of(self._of_rank[0])}

            yield Batch(size, fetch, refill, gather)

    def _gathered(self, number: int, order: Tensor, start: int, stop: int) -> tuple[Any, Any]:
        own = self._engine.backend.chunk(order, start, stop)
        X, y = map_leaves(self._of_rank[number], lambda tensor: self._take(tensor, own, 0, stop - start))
        return X, y

    def _cut(self, size: int, start: int, stop: int) -> tuple[Any, Any]:
        """Samples of the batch that was gathered; gathered once more where they would lie otherwise than by themselves.

        A kernel may be another one for memory that is not aligned.
        """
        backend, window = self._engine.backend, self._window(size)[0]

        def cut(data: Tensor) -> Tensor:
            if start * self._bytes[id(data)] % ALIGNED == 0:
                return backend.chunk(self._whole[id(data)], start, stop)
            return self._take(data, backend.chunk(window, start, stop), 0, stop - start)

        X, y = map_leaves(self._of_rank[0], cut)
        return X, y

    def _window(self, size: int) -> list[Tensor]:
        """For each local rank, the numbers of the samples of a batch of this size; all ranks are on one device."""
        if size not in self._windows:
            self._windows[size] = self._engine.place(np.zeros(size, np.int64))
        return self._windows[size]

    def close(self) -> None:
        """Nothing was started."""


def bytes_of_sample(array: Array) -> int:
    """What one sample takes on a device, where bytes have become floats."""
    return int(np.prod(array.shape[1:], dtype=np.int64)) * (4 if array.dtype == np.uint8 else array.dtype.itemsize)


def _of_rank(placed: dict[int, list[Tensor]], number: int, array: Array) -> Tensor:
    return placed[id(array)][number]
