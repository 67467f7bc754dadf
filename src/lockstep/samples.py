"""Samples and labels within reach of every rank, and batches of them."""

import numpy as np

from lockstep.backends import Tensor
from lockstep.engines import Batch, Engine
from lockstep.layout import Array


class Samples:
    """Placed once on each device; a batch is then a list of sample numbers, and a shard is gathered where needed."""

    def __init__(self, engine: Engine, X: Array, y: Array) -> None:
        self._take, self._num_samples = engine.backend.take, len(X)
        self._X, self._y = engine.place(X), engine.place(y)
        self._as_they_are = engine.place(np.arange(len(X)))

    def batch(self, order: list[Tensor], first: int, stop: int) -> Batch:
        """The samples at places `first` to `stop` of `order` (which every local rank has)."""

        def fetch(rank: int, start: int, end: int) -> tuple[Tensor, Tensor]:
            places = order[rank], first + start, first + end
            return self._take(self._X[rank], *places), self._take(self._y[rank], *places)

        return Batch(stop - first, fetch)

    def all(self) -> Batch:
        """All samples, in their own order."""
        return self.batch(self._as_they_are, 0, self._num_samples)
