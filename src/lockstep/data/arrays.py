"""Nested that were given as arrays or tensors: (X, y), or ((X, y), (X_test, y_test))."""

from typing import Any

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.layout import Array
from lockstep.data.dataset import Dataset, Nested, leaves_of


def dataset_of_arrays(data: Any, name: str) -> Dataset:
    """The data set, once samples and targets were found to fit together.

    >>> data = dataset_of_arrays((np.ones((3, 2)), [0, 1, 1]), "mine")
    >>> data.X_train.dtype, data.y_train.dtype, data.num_train, data.num_test
    (dtype('float32'), dtype('int64'), 3, 0)
    """
    train, test = data if is_two_parts(data) else (data, None)
    X_train, y_train = _checked(train, name, "training")
    if test is None:
        return Dataset(name, X_train, y_train)
    X_test, y_test = _checked(test, name, "test")
    for what, ours, theirs in (("sample", X_train, X_test), ("target", y_train, y_test)):
        kinds = [[f"{a.dtype} of shape {a.shape[1:]}" for a in leaves_of(part)] for part in (ours, theirs)]
        if kinds[0] != kinds[1]:
            raise DataError(
                f"{name}: a training {what} is {' and '.join(kinds[0])}, a test {what} {' and '.join(kinds[1])}."
            )
    return Dataset(name, X_train, y_train, X_test, y_test)


def is_two_parts(data: Any) -> bool:
    """Whether `data` is (training part, test part), each a pair, and not one pair of samples and targets."""
    return (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and all(part is None or (isinstance(part, (tuple, list)) and len(part) == 2) for part in data)
        and data[0] is not None
        and not (isinstance(data[1], list) and not _has_entries(data[1][0]))  # [0, 1] are two labels
    )


def _has_entries(value: Any) -> bool:
    return isinstance(value, (dict, tuple, list)) or getattr(value, "ndim", 0) > 0


def _checked(part: Any, name: str, kind: str) -> tuple[Nested, Nested]:
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise DataError(
            f"{name}: the {kind} data is a {type(part).__name__}. Give a name, (X, y), ((X, y), (X_test, y_test)), or "
            f"a data set with __len__ and __getitem__."
        )
    X = _mapped(part[0], f"{name}: the {kind} samples", labels=False)
    y = _mapped(part[1], f"{name}: the {kind} targets", labels=True)
    lengths = sorted({len(array) for array in leaves_of(X) + leaves_of(y)})
    if len(lengths) != 1 or lengths[0] == 0:
        raise DataError(
            f"{name}: samples and targets of the {kind} data have the lengths {', '.join(map(str, lengths))}. Give one "
            f"target for each sample, and one sample at least."
        )
    return X, y


def _mapped(given: Any, where: str, labels: bool) -> Nested:
    """Tuples and dicts are parts of a sample; a list is one array, with an entry for each sample.

    Bytes are images only where they are all of a sample: a part may be a mask, or tokens.
    """
    match given:
        case dict():
            return {name: _mapped(part, where, labels=True) for name, part in given.items()}
        case tuple():
            return tuple(_mapped(part, where, labels=True) for part in given)
        case _:
            return _as_array(given, where, labels)


def _as_array(given: Any, where: str, labels: bool) -> Array:
    """Whole numbers of 64 bits, float32, bytes, or yes and no (a mask); other kinds are refused."""
    if isinstance(given, list):
        given = [_without_gradient(entry) for entry in given]
    given = _without_gradient(given)
    try:
        array: Array = np.asarray(given)
    except Exception as problem:
        raise DataError(f"{where} cannot be read as an array: {problem}.") from problem
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        raise DataError(f"{where} are {array.dtype} of shape {array.shape}. Give arrays of numbers, samples first.")
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise DataError(f"{where} hold NaN, or numbers that are infinite in float32. Remove them first.")
    elif array.dtype != np.bool_ and (labels or array.dtype != np.uint8):
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise DataError(f"{where} hold {array.max()}, which does not fit into 64 bits with a sign.")
        array = array.astype(np.int64)
    return np.ascontiguousarray(array)


def _without_gradient(given: Any) -> Any:
    """What numpy can read of a tensor of a framework that tracks gradients; other things as they are."""
    if not hasattr(given, "detach"):
        return given
    tensor = given.detach().cpu()
    return tensor.float() if "bfloat16" in str(tensor.dtype) else tensor  # numpy has no bfloat16
