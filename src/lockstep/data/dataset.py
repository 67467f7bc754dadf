"""A dataset in memory: samples and targets, as arrays or nested tuples, lists and dicts of arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.core.layout import Array, sha256_of

FORMS = "Give a name, (X, y), ((X, y), (X_test, y_test)), or a dataset with __len__ and __getitem__."
Nested = Any  # an array with samples first, or a tuple, list or dict of such arrays


@dataclass(frozen=True)
class Dataset:
    """Training and test samples. Bytes (0 to 255) are divided by 255 for the model; other numbers stay as they are."""

    name: str
    X_train: Nested
    y_train: Nested
    X_test: Nested | None = None
    y_test: Nested | None = None

    @property
    def num_train(self) -> int:
        """Number of training samples."""
        return len(leaves_of(self.X_train)[0])

    @property
    def num_test(self) -> int:
        """Number of test samples; there may be none."""
        return 0 if self.X_test is None else len(leaves_of(self.X_test)[0])

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """The shape of one sample: (channels, height, width) for images. None where a sample has several parts."""
        return None if isinstance(self.X_train, (tuple, list, dict)) else tuple(self.X_train.shape[1:])

    @property
    def sha256(self) -> str:
        """A hash of all arrays, their dtypes and shapes."""
        arrays = leaves_of((self.X_train, self.y_train, self.X_test, self.y_test))
        header = ",".join(f"{array.dtype}{array.shape}" for array in arrays)
        return sha256_of([np.frombuffer(header.encode(), np.uint8), *arrays])

    @property
    def num_classes(self) -> int:
        """One more than the largest label; 0 where the targets are not labels."""
        return _largest(self.y_train, self.y_test) + 1

    @property
    def num_tokens(self) -> int:
        """One more than the largest integer in the samples; 0 where they are not tokens."""
        return 0 if leaves_of(self.X_train)[0].dtype == np.uint8 else _largest(self.X_train, self.X_test) + 1


def pair_of(given: Any) -> tuple[Any, Any] | None:
    """A sample or a batch as (inputs, target), of (input, target) or (input, ..., target); None where it is neither."""
    if not isinstance(given, (tuple, list)) or len(given) < 2:
        return None
    return given[0] if len(given) == 2 else tuple(given[:-1]), given[-1]


def leaves_of(samples: Nested | None) -> list[Array]:
    """The arrays in `samples`, in order; None holds none."""
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
    arrays = leaves_of(parts)
    return max(int(array.max()) for array in arrays) if all(array.dtype.kind in "iu" for array in arrays) else -1
