"""Parameters in one flat vector and back; the hash of the parameters."""

import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.core.layout import ALIGNMENT, Layout, layout_of, sha256_of

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
parameters = st.lists(
    shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(width=32))), min_size=1, max_size=6
)


def layout_for(arrays):
    return layout_of({f"p{i}": array for i, array in enumerate(arrays)})


@given(parameters)
def test_parameters_come_back_with_the_same_bits(arrays):
    layout = layout_for(arrays)
    flat = layout.flatten(arrays)
    assert flat.dtype == np.float32
    assert flat.shape == (layout.size,)
    back = layout.unflatten(flat)
    assert [array.shape for array in back] == [array.shape for array in arrays]
    assert [array.tobytes() for array in back] == [array.tobytes() for array in arrays]


@given(parameters)
def test_every_parameter_starts_on_a_cache_line_and_gaps_are_zero(arrays):
    layout = layout_for(arrays)
    starts = list(itertools.accumulate(layout.pieces, initial=0))
    flat = layout.flatten([np.ones_like(array) for array in arrays])
    for number, array in enumerate(arrays):
        start = starts[2 * number]
        assert start % ALIGNMENT == 0
        assert layout.pieces[2 * number] == array.size
        assert flat[start : start + array.size].tolist() == [1] * array.size
    assert all(0 <= gap < ALIGNMENT for gap in layout.pieces[1::2])
    assert len(layout.pieces) == 2 * len(arrays)
    assert layout.size % ALIGNMENT == 0
    assert flat.sum() == sum(array.size for array in arrays)


def test_a_cache_line_has_64_bytes():
    assert ALIGNMENT * np.dtype(np.float32).itemsize == 64


def test_a_layout_by_hand():
    layout = Layout(("W", "b", "c"), ((3, 6), (16,), ()))
    assert layout.pieces == (18, 14, 16, 0, 1, 15)
    assert layout.size == 64
    flat = layout.flatten([np.full((3, 6), 1.0), np.full(16, 2.0), np.array(3.0)])
    assert flat.tolist() == [1] * 18 + [0] * 14 + [2] * 16 + [3] + [0] * 15


def test_the_parameters_are_views_of_the_vector():
    layout = Layout(("W", "b"), ((3, 2), (2,)))
    flat = np.zeros(layout.size, np.float32)
    W, b = layout.unflatten(flat)
    W[2, 1], b[0] = 5, 7
    assert (flat[5], flat[16]) == (5, 7)


def test_a_parameter_too_few_or_too_many_is_refused():
    layout = Layout(("W", "b"), ((3, 2), (2,)))
    for arrays in ([np.zeros((3, 2))], [np.zeros((3, 2)), np.zeros(2), np.zeros(2)]):
        with pytest.raises(ValueError, match="zip"):
            layout.flatten(arrays)


def test_names_and_shapes_are_in_the_order_of_the_mapping():
    layout = layout_of({"z": np.zeros((2, 1)), "a": np.zeros(())})
    assert (layout.names, layout.shapes) == (("z", "a"), ((2, 1), ()))


def hash_by_hand(arrays):
    numbers = [number for array in arrays for number in array.reshape(-1).tolist()]
    return hashlib.sha256(struct.pack(f"<{len(numbers)}f", *numbers)).hexdigest()


@given(parameters)
def test_the_hash_is_that_of_the_concatenated_bytes(arrays):
    assert sha256_of(arrays) == hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def test_the_hash_by_hand():
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(-1.5, np.float32)]
    assert sha256_of(arrays) == hash_by_hand(arrays)
    assert sha256_of([]) == hashlib.sha256(b"").hexdigest()
    assert sha256_of([np.array([1, -2], np.float32)]) == hashlib.sha256(bytes.fromhex("0000803f000000c0")).hexdigest()


GRID = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "other",
    [
        GRID.astype(">f4"),
        np.asfortranarray(GRID),
        np.asfortranarray(GRID.astype(">f4")),
        np.repeat(GRID, 2, axis=1)[:, ::2],
        np.ascontiguousarray(GRID[::-1])[::-1],
        np.ascontiguousarray(GRID.T).T,
    ],
    ids=["big-endian", "Fortran order", "both", "every other", "backwards", "transposed twice"],
)
def test_the_hash_does_not_depend_on_byte_order_or_strides(other):
    np.testing.assert_array_equal(other, GRID)
    assert sha256_of([other]) == sha256_of([GRID]) == hash_by_hand([GRID])


def test_the_hash_depends_on_order_sign_of_zero_and_last_bit():
    one, two = np.array([1.0], np.float32), np.array([2.0], np.float32)
    assert sha256_of([one, two]) != sha256_of([two, one])
    assert sha256_of([GRID]) != sha256_of([GRID.T])
    assert sha256_of([np.array([0.0], np.float32)]) != sha256_of([np.array([-0.0], np.float32)])
    assert sha256_of([one]) != sha256_of([np.nextafter(one, two)])


def test_the_hash_does_not_include_gaps():
    layout = Layout(("W", "b"), ((3, 2), (2,)))
    arrays = [np.ones((3, 2), np.float32), np.ones(2, np.float32)]
    flat = layout.flatten(arrays)
    flat[6:16] = 9
    assert sha256_of(layout.unflatten(flat)) == sha256_of(arrays)
