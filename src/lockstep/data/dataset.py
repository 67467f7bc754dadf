"""A data set in memory: images or vectors, and a class number for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.layout import Array, sha256_of

Nested = Any  # an array with samples first, or a tuple, list or dict of such


@dataclass(frozen=True)
class Dataset:
    """Training and test samples. Bytes stand for 0 to 255 and reach the model as 0 to 1; other numbers as they are.

    X and y are arrays with samples first, or tuples, lists and dicts of such arrays.
    """

    name: str
    X_train: Nested
    y_train: Nested
    X_test: Nested | None = None
    y_test: Nested | None = None

    @property
    def num_train(self) -> int:
        """Training samples."""
        return len(leaves_of(self.X_train)[0])

    @property
    def num_test(self) -> int:
        """Test samples; there may be none."""
        return 0 if self.X_test is None else len(leaves_of(self.X_test)[0])

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """The shape of one sample: (channels, height, width) for images. None where a sample has several parts."""
        return None if isinstance(self.X_train, (tuple, list, dict)) else tuple(self.X_train.shape[1:])

    @property
    def sha256(self) -> str:
        """What tells this data from any other: the numbers, their types and shapes."""
        arrays = [a for part in (self.X_train, self.y_train, self.X_test, self.y_test) for a in leaves_of(part)]
        kinds = ",".join(f"{array.dtype}{array.shape}" for array in arrays)
        return sha256_of([np.frombuffer(kinds.encode(), np.uint8), *arrays])

    @property
    def num_classes(self) -> int:
        """One more than the largest label; 0 where the targets are not labels."""
        return _largest(self.y_train, self.y_test) + 1

    @property
    def num_tokens(self) -> int:
        """One more than the largest whole number in the samples; 0 where they are not whole numbers."""
        return 0 if leaves_of(self.X_train)[0].dtype == np.uint8 else _largest(self.X_train, self.X_test) + 1


def leaves_of(samples: Nested | None) -> list[Array]:
    """The arrays in `samples`, in order."""
    match samples:
        case None:
            return []
        case dict():
            return [array for part in samples.values() for array in leaves_of(part)]
        case tuple() | list():
            return [array for part in samples for array in leaves_of(part)]
        case _:
            return [samples]


def map_leaves(samples: Nested, function: Callable[[Any], Any]) -> Any:
    """`samples` with `function` applied to each array; tuples, lists and dicts stay what they are."""
    match samples:
        case dict():
            return {name: map_leaves(part, function) for name, part in samples.items()}
        case tuple() if hasattr(samples, "_fields"):
            return type(samples)(*(map_leaves(part, function) for part in samples))
        case tuple() | list():
            return type(samples)(map_leaves(part, function) for part in samples)
        case _:
            return function(samples)


def _largest(*parts: Nested | None) -> int:
    arrays = [array for part in parts for array in leaves_of(part)]
    return max(int(array.max()) for array in arrays) if all(array.dtype.kind in "iu" for array in arrays) else -1


def checked_dataset(name: str, X_train: Array, y_train: Array, X_test: Array, y_test: Array) -> Dataset:
    """The data set, once samples and labels fit together; images without a channel dimension get one.

    Samples are bytes or floats (images, vectors), or whole numbers (tokens), with the next tokens as labels if need be.
    """
    parts = []
    for part, X, y in (("train", X_train, y_train), ("test", X_test, y_test)):
        is_tokens = X.dtype.kind in "iu" and X.dtype != np.uint8
        if X.dtype != np.uint8 and not is_tokens and not np.issubdtype(X.dtype, np.floating):
            raise DataError(f"{name}: X_{part} has numbers of type {X.dtype}. Use uint8, float32, or int64 for tokens.")
        if y.dtype.kind not in "iu":
            raise DataError(f"{name}: y_{part} has numbers of type {y.dtype}. Labels are whole numbers from 0 on.")
        if X.ndim < 2 or not (y.ndim == 1 or (is_tokens and y.shape == X.shape)):
            raise DataError(
                f"{name}: X_{part} has shape {X.shape} and y_{part} {y.shape}. "
                f"X needs samples first and at least one more dimension, y one label for each sample (or token)."
            )
        if len(X) != len(y) or not len(X):
            raise DataError(f"{name}: {len(X)} samples in X_{part} and {len(y)} labels in y_{part}.")
        if y.min() < 0 or y.max() > 65_535:
            raise DataError(f"{name}: the labels in y_{part} go from {y.min()} to {y.max()}. Use 0 to 65535.")
        if np.issubdtype(X.dtype, np.floating):
            with np.errstate(over="ignore"):
                X = X.astype(np.float32)
            if not np.isfinite(X).all():
                raise DataError(
                    f"{name}: X_{part} holds NaN, or numbers that are infinite in float32. Remove them first."
                )
        if is_tokens and (X.min() < 0 or X.max() >= 2**31):
            raise DataError(f"{name}: the tokens in X_{part} go from {X.min()} to {X.max()}. Use 0 to {2**31 - 1}.")
        X = X.astype(np.int64) if is_tokens else X[:, None] if X.ndim == 3 else X
        parts += [np.ascontiguousarray(X), y.astype(np.int64)]
    X_train, y_train, X_test, y_test = parts
    if X_train.dtype != X_test.dtype:
        raise DataError(
            f"{name}: X_train holds {X_train.dtype} and X_test {X_test.dtype}: bytes are divided by 255, floats not. "
            f"Make them the same."
        )
    if X_train.shape[1:] != X_test.shape[1:]:
        raise DataError(
            f"{name}: a training sample has shape {X_train.shape[1:]} and a test sample {X_test.shape[1:]}. "
            f"Make them the same."
        )
    return Dataset(name, X_train, y_train, X_test, y_test)
