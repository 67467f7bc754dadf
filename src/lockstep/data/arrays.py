"""Datasets from arrays or tensors, (X, y) or ((X, y), (X_test, y_test)), once they were found to fit together."""

from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.layout import Array
from lockstep.data.dataset import FORMS, Dataset, Nested, leaves_of

MAX_LABEL, MAX_TOKEN = 2**16 - 1, 2**31 - 1  # that a file may hold


def dataset_of_arrays(data: Any, name: str) -> Dataset:
    """The dataset of the user's own arrays, or tensors of any framework.

    >>> data = dataset_of_arrays((np.ones((3, 2)), [0, 1, 1]), "mine")
    >>> data.X_train.dtype, data.y_train.dtype, data.num_train, data.num_test
    (dtype('float32'), dtype('int64'), 3, 0)
    """
    train, test = data if is_two_parts(data) else (data, None)
    checked_train = _checked_part(train, name, "training")
    return _dataset(name, checked_train, None if test is None else _checked_part(test, name, "test"))


def labelled_dataset(name: str, X_train: Array, y_train: Array, X_test: Array, y_test: Array) -> Dataset:
    """The dataset of arrays from a file; images without a channel dimension get one.

    Samples are bytes or floats (images, vectors), or integers (tokens), with the next tokens as labels if need be.
    """
    parts = []
    for kind, X, y in (("training", X_train, y_train), ("test", X_test, y_test)):
        is_tokens = X.dtype.kind in "iu" and X.dtype != np.uint8
        if X.dtype.kind not in "fiu":
            raise DataError(f"{name}: the {kind} samples are {X.dtype}. Use uint8, float32, or int64 for tokens.")
        if y.dtype.kind not in "iu":
            raise DataError(f"{name}: the {kind} labels are {y.dtype}. Use integers from 0 on.")
        if X.ndim < 2 or not (y.ndim == 1 or (is_tokens and y.shape == X.shape)):
            raise DataError(
                f"{name}: the {kind} samples have shape {X.shape}, the labels {y.shape}. X needs samples first and at "
                f"least one more dimension, y one label for each sample (or token)."
            )
        X, y = _checked_part((X, y), name, kind)
        limited = [("labels", y, MAX_LABEL)] + [("tokens", X, MAX_TOKEN)] * is_tokens
        for what, array, limit in limited:
            if array.size and (array.min() < 0 or array.max() > limit):
                raise DataError(f"{name}: the {kind} {what} go from {array.min()} to {array.max()}. Use 0 to {limit}.")
        parts.append((X[:, None] if X.ndim == 3 and not is_tokens else X, y))
    return _dataset(name, *parts)


def is_two_parts(data: Any) -> bool:
    """Whether `data` is (training part, test part), each a pair, and not one pair of samples and targets."""
    if not _is_pair(data) or not _is_pair(data[0]) or not (data[1] is None or _is_pair(data[1])):
        return False
    if not isinstance(data[1], list):
        return True
    entry = data[1][0]  # [0, 1] are two labels
    return isinstance(entry, (dict, tuple, list)) or getattr(entry, "ndim", 0) > 0


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _dataset(name: str, train: tuple[Nested, Nested], test: tuple[Nested, Nested] | None) -> Dataset:
    for what, ours, theirs in zip(("sample", "target"), train, test or train, strict=True):
        found = [" and ".join(f"{a.dtype} of shape {a.shape[1:]}" for a in leaves_of(part)) for part in (ours, theirs)]
        if found[0] != found[1]:
            raise DataError(
                f"{name}: a training {what} is {found[0]}, a test {what} {found[1]}. Make them the same: bytes are "
                f"divided by 255, other numbers are not."
            )
    return Dataset(name, *train, *(test or ()))


def _checked_part(part: Any, name: str, kind: str) -> tuple[Nested, Nested]:
    if not _is_pair(part):
        raise DataError(f"{name}: the {kind} data is a {type(part).__name__}. {FORMS}")
    X = _converted(part[0], f"{name}: the {kind} samples", keeps_bytes=True)
    y = _converted(part[1], f"{name}: the {kind} targets", keeps_bytes=False)
    if isinstance(X, np.ndarray) and X.dtype == np.uint8 and isinstance(y, np.ndarray) and np.array_equal(X, y):
        y = X  # images as both, for an autoencoder: divided by 255 as both
    lengths = sorted({len(array) for array in leaves_of((X, y))})
    if len(lengths) != 1 or lengths[0] == 0:
        raise DataError(
            f"{name}: samples and targets of the {kind} data have lengths {lengths}. Give samples, each with a target."
        )
    return X, y


def _converted(values: Any, where: str, keeps_bytes: bool) -> Nested:
    """Tuples and dicts are parts of a sample, whose bytes are no images; a list is one array of samples."""
    match values:
        case dict():
            return {name: _converted(part, where, keeps_bytes=False) for name, part in values.items()}
        case tuple():
            return tuple(_converted(part, where, keeps_bytes=False) for part in values)
        case list():
            return _as_array([_as_host_tensor(entry) for entry in values], where, keeps_bytes)
        case _:
            return _as_array(_as_host_tensor(values), where, keeps_bytes)


def _as_array(values: Any, where: str, keeps_bytes: bool) -> Array:
    """An array of int64, float32, bytes or bools (a mask); other dtypes are refused."""
    try:
        array: Array = np.asarray(values)
    except Exception as problem:
        raise DataError(f"{where} cannot be read as an array: {problem}.") from problem
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        raise DataError(f"{where} are {array.dtype} of shape {array.shape}. Give arrays of numbers, samples first.")
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise DataError(f"{where} hold NaN, or numbers that are infinite in float32. Remove them first.")
    elif array.dtype != np.bool_ and not (keeps_bytes and array.dtype == np.uint8):
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise DataError(f"{where} hold {array.max()}, which does not fit into int64. Use smaller numbers.")
        array = array.astype(np.int64)
    return np.ascontiguousarray(array)


def _as_host_tensor(value: Any) -> Any:
    """A tensor of a framework that tracks gradients in a form that numpy can read; other things as they are."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return tensor.float() if "bfloat16" in str(tensor.dtype) else tensor  # numpy has no bfloat16
