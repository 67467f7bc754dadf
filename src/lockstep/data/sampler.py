"""A sampler of the user's own: which samples an epoch has, and in which order, drawn with (seed, epoch) as the key."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.layout import Array
from lockstep.core.random import SAMPLER
from lockstep.data.seeded import seeded

FORMS = "Give a sampler as a DataLoader takes it, another iterable of sample numbers, or a function of the epoch"


class SampledOrder:
    """The order of samples that a sampler gives; the same whenever it is asked for the same epoch."""

    def __init__(self, sampler: Any, seed: int, num_samples: int) -> None:
        self._sampler, self._seed, self._num_samples = sampler, seed, num_samples
        first = self._drawn(0)
        self.length = len(first)  # samples of an epoch
        self._drawn(1)
        if not np.array_equal(first, self._drawn(0)):
            raise DataError(
                "The sampler gives another order each time for the same epoch: it has a generator of its own. Leave "
                "its generator out: then it draws from generators that are keyed by (seed, epoch)."
            )

    def __call__(self, epoch: int) -> Array:
        """The sample numbers of an epoch, which counts from 0."""
        order = self._drawn(epoch)
        if len(order) != self.length:
            raise DataError(
                f"The sampler gives {len(order)} samples in epoch {epoch + 1}, and {self.length} in the first. All "
                f"epochs need the same number: steps are counted by it."
            )
        return order

    def _drawn(self, epoch: int) -> Array:
        with seeded(self._seed, epoch, 0, SAMPLER):
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            is_iterable = isinstance(self._sampler, Iterable)
            numbers = self._sampler if is_iterable or not callable(self._sampler) else self._sampler(epoch)
            if not isinstance(numbers, Iterable) or (is_iterable and isinstance(numbers, Iterator)):
                raise DataError(f"The sampler is a {type(numbers).__name__}, not one for every epoch. {FORMS}.")
            found = list(numbers)
        if not found:
            raise DataError("The sampler gives no samples. Give one at least.")
        if wrong := [each for each in found if not hasattr(each, "__index__") or np.ndim(each)]:
            hint = "a batch sampler? Batches are made of batch_size samples, in the sampler's order"
            raise DataError(f"The sampler gives {wrong[0]!r}, which is not a sample number ({hint}). {FORMS}.")
        order = np.array(found, np.int64)
        if order.min() < 0 or order.max() >= self._num_samples:
            number = order.min() if order.min() < 0 else order.max()
            raise DataError(f"The sampler gives sample {number}, and there are samples 0 to {self._num_samples - 1}.")
        return order
