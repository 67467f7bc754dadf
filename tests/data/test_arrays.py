"""Datasets from arrays and tensors: every form that is accepted, and what is refused."""

import numpy as np
import pytest
import torch

from lockstep.core.errors import DataError
from lockstep.data.arrays import dataset_of_arrays
from lockstep.data.dataset import leaves_of, map_leaves

X, Y = np.ones((4, 3)), np.arange(4)


@pytest.mark.parametrize(
    ("X", "samples", "targets"),
    [
        (X, "float32", "int64"),
        (X.astype(np.float16), "float32", "int64"),
        (X.astype(np.uint8), "uint8", "int64"),
        (X.astype(np.int32), "int64", "int64"),
        (X.astype(bool), "bool", "int64"),
        (torch.ones(4, 3, dtype=torch.float64, requires_grad=True), "float32", "int64"),
        (torch.ones(4, 3, dtype=torch.bfloat16), "float32", "int64"),
    ],
)
def test_numbers_become_float32_int64_or_stay_bytes(X, samples, targets):
    data = dataset_of_arrays((X, Y.astype(np.uint8)), "mine")
    assert (data.X_train.dtype, data.y_train.dtype) == (samples, targets)
    assert data.X_train.flags.c_contiguous


def test_training_and_test_part():
    data = dataset_of_arrays(((X, Y), (X[:2], Y[:2])), "mine")
    assert (data.num_train, data.num_test, data.num_classes, data.sample_shape) == (4, 2, 4, (3,))
    assert dataset_of_arrays(((X, Y), None), "mine").num_test == 0
    assert dataset_of_arrays([[X, Y], [X[:2], Y[:2]]], "mine").num_test == 2


def test_a_pair_of_inputs_is_not_a_training_and_a_test_part():
    data = dataset_of_arrays(((X, 2 * X), Y), "mine")
    assert data.num_train == 4
    assert data.sample_shape is None
    assert dataset_of_arrays((X, [0, 1, 2, 0]), "mine").y_train.tolist() == [0, 1, 2, 0]
    assert dataset_of_arrays((X[:2], [0, 1]), "mine").y_train.tolist() == [0, 1]


def test_bytes_in_a_part_of_a_sample_are_tokens():
    parts = {"tokens": np.ones((4, 2), np.uint8), "mask": np.ones((4, 2), bool)}
    data = dataset_of_arrays((parts, Y), "mine")
    assert {name: str(array.dtype) for name, array in data.X_train.items()} == {"tokens": "int64", "mask": "bool"}


def test_the_hash_is_that_of_the_arrays():
    whole = dataset_of_arrays((X, Y), "a").sha256
    assert whole == dataset_of_arrays((torch.ones(4, 3), list(Y)), "b").sha256
    assert whole != dataset_of_arrays(({"x": 2 * X}, Y), "a").sha256
    assert whole != dataset_of_arrays(((X, Y), (X, Y)), "a").sha256


def test_tokens_and_classes_are_counted():
    assert dataset_of_arrays((np.array([[1, 7], [2, 3]]), np.array([[7, 2], [3, 9]])), "a").num_tokens == 8
    assert dataset_of_arrays((X, X), "a").num_classes == 0


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (X, "mine: the training data is a ndarray. Give a name, (X, y)"),
        ((X, Y, Y), "mine: the training data is a tuple."),
        ((X, Y[:3]), "mine: samples and targets of the training data have lengths [3, 4]."),
        ((X[:0], Y[:0]), "mine: samples and targets of the training data have lengths [0]."),
        ((np.full((4, 3), np.nan), Y), "mine: the training samples hold NaN"),
        ((X, np.full(4, np.inf)), "mine: the training targets hold NaN"),
        ((np.array(["a", "b"]), Y[:2]), "mine: the training samples are <U1 of shape (2,)."),
        ((np.float32(3), Y), "mine: the training samples are float32 of shape ()."),
        (
            ((X, Y), (X[:, :2], Y)),
            "mine: a training sample is float32 of shape (3,), a test sample float32 of shape (2,).",
        ),
        (((X, Y), (X, X)), "mine: a training target is int64 of shape (), a test target float32 of shape (3,)."),
        ((np.array([[2**63 + 1]], np.uint64), [1]), "mine: the training samples hold 9223372036854775809"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(data, sentence):
    with pytest.raises(DataError) as refused:
        dataset_of_arrays(data, "mine")
    assert str(refused.value).startswith(sentence)


def test_map_leaves_keeps_tuples_lists_and_dicts():
    from collections import namedtuple

    Pair = namedtuple("Pair", "left right")
    nested = {"a": (1, [2, 3]), "b": Pair(4, 5)}
    assert map_leaves(nested, lambda leaf: 10 * leaf) == {"a": (10, [20, 30]), "b": Pair(40, 50)}
    assert leaves_of(nested) == [1, 2, 3, 4, 5]
