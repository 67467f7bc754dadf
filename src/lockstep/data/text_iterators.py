"""The text's data iterators, for loops of one's own: batches of Fashion-MNIST as tensors of any framework."""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from lockstep.backends import DEFAULT_BACKEND, Backend, Tensor, load_backend
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array
from lockstep.data import load_dataset
from lockstep.data.order import sample_order


class BatchForm(NamedTuple):
    """What batches are made of."""

    backend: Backend
    batch_size: int
    size: tuple[int, int] | None  # height and width that images are resized to


class Batches:
    """The batches (X, y) of one pass over the samples; every pass over the training samples has another order."""

    def __init__(self, form: BatchForm, X: Array, y: Array, seed: int | None) -> None:
        self._form, self._X, self._y, self._seed = form, X, y, seed
        self._epochs = count()

    def __len__(self) -> int:
        return -(-len(self._X) // self._form.batch_size)

    def __repr__(self) -> str:
        size = "" if self._form.size is None else f", resized to {'x'.join(map(str, self._form.size))}"
        return f"<{len(self):,} batches of up to {self._form.batch_size:,} of {len(self._X):,} samples (X, y){size}>"

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = np.arange(len(self._X))
        if self._seed is not None:
            order = sample_order(self._seed, next(self._epochs), len(order))
        for start in range(0, len(order), self._form.batch_size):
            chosen = order[start : start + self._form.batch_size]
            X = self._X[chosen].astype(np.float32) / np.float32(255)
            if self._form.size is not None:
                X = resized(X, self._form.size)
            arrays = X, self._y[chosen].astype(np.int64)
            first, second = (self._form.backend.from_numpy(array, Device("cpu:0")) for array in arrays)
            yield first, second


def load_data_fashion_mnist(
    batch_size: int,
    resize: int | tuple[int, int] | None = None,
    *,
    data: str = "fashion-mnist",
    backend: str = DEFAULT_BACKEND,
    seed: int = 0,
) -> tuple[Batches, Batches]:
    """Iterators over the training and the test images of Fashion-MNIST, for a loop of your own, as the text has them.

    X has the shape (batch_size, 1, 28, 28) and values from 0 to 1, y holds labels from 0 to 9. Every pass over the
    training images has another order, drawn from `seed`: that of `lockstep.train`. `resize=96` makes images of 96x96,
    (height, width) of others, by bilinear interpolation. `data="fashion-mnist-mini"` is small, and ships with Lockstep.

    >>> train_iter, test_iter = load_data_fashion_mnist(256, data="fashion-mnist-mini", backend="numpy")
    >>> len(train_iter), [X.shape for X, y in test_iter]
    (8, [(256, 1, 28, 28), (244, 1, 28, 28)])
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch size must be an integer of at least 1, got {batch_size!r}.")
    form = BatchForm(load_backend(backend), batch_size, _size(resize))
    found = load_dataset(data)
    test_X, test_y = (found.X_train[:0], found.y_train[:0]) if found.X_test is None else (found.X_test, found.y_test)
    if form.size is not None and (found.sample_shape is None or len(found.sample_shape) < 2):
        raise ConfigError(f"The samples of {data} are no images: they cannot be resized. Leave resize out.")
    train = Batches(form, found.X_train, found.y_train, seed)
    return train, Batches(form, test_X, np.asarray(test_y), None)


def _size(resize: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if resize is None:
        return None
    sizes = (resize, resize) if isinstance(resize, int) else tuple(resize) if isinstance(resize, (tuple, list)) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"resize must be a number of pixels or (height, width), got {resize!r}. Like 96, or (96, 64)."
        )
    return sizes[0], sizes[1]


def resized(X: Array, size: tuple[int, int]) -> Array:
    """Images (samples, ..., height, width) of another height and width, by bilinear interpolation.

    >>> resized(np.array([[[0.0, 1.0]]], np.float32), (1, 4))
    array([[[0.  , 0.25, 0.75, 1.  ]]], dtype=float32)
    """
    height, width = (_weights(old, new) for old, new in zip(X.shape[-2:], size, strict=True))
    return height @ X @ width.T


def _weights(old: int, new: int) -> Array:
    """How much of each of `old` pixels there is in each of `new`: a triangle around the pixel's centre.

    Where pixels become fewer, the triangle is as wide as a new pixel, so that every old one counts.
    """
    scale = old / new
    centres = (np.arange(new) + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(old) - centres[:, None]) / max(scale, 1))
    share: Array = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return share
