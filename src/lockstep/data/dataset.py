"""A data set in memory: images or vectors, and a class number for each."""

from dataclasses import dataclass

import numpy as np

from lockstep.errors import DataError
from lockstep.layout import Array, sha256_of


@dataclass(frozen=True)
class Dataset:
    """Training and test samples. Bytes stand for 0 to 255 and reach the model as 0 to 1; floats stay as they are."""

    name: str
    X_train: Array
    y_train: Array
    X_test: Array
    y_test: Array

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample: (channels, height, width) for images."""
        return tuple(self.X_train.shape[1:])

    @property
    def sha256(self) -> str:
        """What tells this data from any other: the numbers, their types and shapes."""
        arrays = [self.X_train, self.y_train, self.X_test, self.y_test]
        kinds = ",".join(f"{array.dtype}{array.shape}" for array in arrays)
        return sha256_of([np.frombuffer(kinds.encode(), np.uint8), *arrays])

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return int(max(self.y_train.max(), self.y_test.max())) + 1


def checked_dataset(name: str, X_train: Array, y_train: Array, X_test: Array, y_test: Array) -> Dataset:
    """The data set, once samples and labels fit together; images without a channel dimension get one."""
    parts = []
    for part, X, y in (("train", X_train, y_train), ("test", X_test, y_test)):
        if X.dtype != np.uint8 and not np.issubdtype(X.dtype, np.floating):
            raise DataError(f"{name}: X_{part} has numbers of type {X.dtype}. Use uint8 or float32.")
        if y.dtype.kind not in "iu":
            raise DataError(f"{name}: y_{part} has numbers of type {y.dtype}. Labels are whole numbers from 0 on.")
        if y.ndim != 1 or X.ndim < 2:
            raise DataError(
                f"{name}: X_{part} has shape {X.shape} and y_{part} {y.shape}. "
                f"X needs samples first and at least one more dimension, y one label for each sample."
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
        X = X[:, None] if X.ndim == 3 else X
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
