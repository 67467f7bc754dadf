"""The text's data iterators, for loops of one's own: batches of Fashion-MNIST as tensors of any framework."""

from collections.abc import Iterator
from itertools import count

import numpy as np

from lockstep.backends import DEFAULT_BACKEND, Backend, Tensor, load_backend
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array
from lockstep.data import load_dataset
from lockstep.data.order import sample_order


class Batches:
    """The batches (X, y) of one pass over the samples; every pass over the training samples has another order."""

    def __init__(self, backend: Backend, X: Array, y: Array, batch_size: int, seed: int | None) -> None:
        self._backend, self._X, self._y, self._batch_size, self._seed = backend, X, y, batch_size, seed
        self._epochs = count()

    def __len__(self) -> int:
        return -(-len(self._X) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = np.arange(len(self._X))
        if self._seed is not None:
            order = sample_order(self._seed, next(self._epochs), len(order))
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            X = self._X[chosen].astype(np.float32) / np.float32(255)
            arrays = X, self._y[chosen].astype(np.int64)
            first, second = (self._backend.from_numpy(array, Device("cpu:0")) for array in arrays)
            yield first, second


def load_data_fashion_mnist(
    batch_size: int, *, data: str = "fashion-mnist", backend: str = DEFAULT_BACKEND, seed: int = 0
) -> tuple[Batches, Batches]:
    """Iterators over the training and the test images of Fashion-MNIST, for a loop of your own, as the text has them.

    X has the shape (batch_size, 1, 28, 28) and values from 0 to 1, y holds labels from 0 to 9. Every pass over the
    training images has another order, drawn from `seed`: that of `lockstep.train`. `data="fashion-mnist-mini"` is
    small, and ships with Lockstep.

    >>> train_iter, test_iter = load_data_fashion_mnist(256, data="fashion-mnist-mini", backend="numpy")
    >>> len(train_iter), [X.shape for X, y in test_iter]
    (8, [(256, 1, 28, 28), (244, 1, 28, 28)])
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch size must be an integer of at least 1, got {batch_size!r}.")
    found, framework = load_dataset(data), load_backend(backend)
    test_X, test_y = (found.X_train[:0], found.y_train[:0]) if found.X_test is None else (found.X_test, found.y_test)
    train = Batches(framework, found.X_train, found.y_train, batch_size, seed)
    return train, Batches(framework, test_X, np.asarray(test_y), batch_size, None)
