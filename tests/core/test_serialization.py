"""Trees of plain values and arrays as bytes, and back; any other bytes are refused as corrupt."""

import math
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from lockstep.core import serialization
from lockstep.core.serialization import CorruptData, NotSerializable, pack, unpack

DTYPES = ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "<c8"]


@st.composite
def any_array(draw):
    """Of every dtype, with any bits (NaN with a payload, -0.0), 0-d, empty, and not contiguous."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    size = math.prod(shape)
    if dtype.kind == "b":
        flat = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.bool_)
    else:
        num_bytes = size * dtype.itemsize
        flat = np.frombuffer(draw(st.binary(min_size=num_bytes, max_size=num_bytes)), dtype)
    array = flat.reshape(shape)
    match draw(st.sampled_from(["as it is", "fortran", "transposed", "every second", "backwards"])):
        case "fortran":
            return np.asfortranarray(array)
        case "transposed":
            return array.T
        case "every second" if array.ndim:
            return np.repeat(array, 2, axis=0)[::2]
        case "backwards" if array.ndim:
            return array[::-1]
    return array


KEYS = st.text(max_size=4) | st.sampled_from(["", "a", "b", "a/b", "/0", "array", "$array", "$tuple", "$pairs", "1"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
LEAVES = PLAIN | any_array()


def above(below):
    return (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.integers(), below, max_size=3)
        | st.dictionaries(KEYS, below, max_size=3)
    )


TREES = st.recursive(LEAVES, above, max_leaves=12)


def same(ours, theirs):
    """Whether two trees are the same to the bit: types, order of keys, and the bytes of floats."""
    if type(ours) is not type(theirs):
        return False
    match ours:
        case np.ndarray():
            return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
        case float():
            return (math.isnan(ours) and math.isnan(theirs)) or struct.pack("d", ours) == struct.pack("d", theirs)
        case dict():
            keys = [(type(key), key) for key in ours], [(type(key), key) for key in theirs]
            return keys[0] == keys[1] and all(map(same, ours.values(), theirs.values()))
        case list() | tuple():
            return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def rebuilt(tree):
    """An equal tree that shares nothing with it, its arrays contiguous."""
    match tree:
        case np.ndarray():
            return np.array(tree, order="C")
        case dict():
            return {key: rebuilt(entry) for key, entry in tree.items()}
        case list() | tuple():
            return type(tree)(rebuilt(entry) for entry in tree)
    return tree


A, B = np.arange(2), np.arange(3)


@given(TREES)
@example({"a/b": A, "a": {"b": B}})
@example({"": A, "array": B})
@example({"a": [A], "a/0": B})
@example({1: A, "1": B, "$array": "a"})
@example({"__metadata__": A})
@example({"x": float("nan"), "y": (float("inf"), -float("inf"), -0.0), -7: [[], (), {}, None, True, 10**30]})
@settings(max_examples=300)
def test_what_was_packed_is_unpacked_to_the_bit(tree):
    assert same(unpack(pack(tree)), tree)


@given(TREES)
def test_equal_trees_give_equal_bytes(tree):
    assert pack(rebuilt(tree)) == pack(tree)


@given(TREES)
def test_what_was_unpacked_is_packed_into_the_same_bytes(tree):
    assert pack(unpack(pack(tree))) == pack(tree)


def test_unpacked_arrays_do_not_share_memory():
    data = pack({"a": np.arange(3)})
    first, second = unpack(data), unpack(data)
    first["a"] = first["a"].copy()
    first["a"][0] = 9
    assert second["a"].tolist() == [0, 1, 2]


def test_big_endian_arrays_keep_their_numbers():
    numbers = np.array([1.5, -2.0], ">f4")
    assert unpack(pack({"a": numbers}))["a"].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (object(), "it is a object"),
        (b"bytes", "it is a bytes"),
        ({1, 2}, "it is a set"),
        ({"a": 1j}, "a is a complex"),
        ({"a": {"b": [1, (2, {3})]}}, "a/b/1/1 is a set"),
        ([np.float32(1)], "/0 is a float32"),
        ({"a": {1.5: 2}}, "a is a dict"),
        ({"a": {None: 2}}, "a is a dict"),
        ({"step": {7: object}}, "step/7 is a type"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_path(tree, sentence):
    with pytest.raises(NotSerializable) as refused:
        pack(tree)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "array",
    [np.array(["text"]), np.array([object()]), np.zeros(2, [("x", "i4")]), np.zeros(2, "M8[D]"), np.zeros(2, "c16")],
    ids=lambda array: array.dtype.name,
)
def test_arrays_of_other_dtypes_are_refused_with_their_path(array):
    with pytest.raises(NotSerializable, match=r"^deep/in/1"):
        pack({"deep": {"in": [0, array]}})


# --- corrupt data

TREE = {"step": 3, "rates": (0.1, float("nan")), 7: [np.arange(5, dtype=np.float32), np.zeros((2, 0))], "on": True}
DATA = pack(TREE)


def check_corrupt(data):
    assert data != DATA
    with pytest.raises(CorruptData) as refused:
        unpack(data)
    assert str(refused.value) in (
        "it is not a safetensors file",
        "its SHA-256 is not that of what it holds",
        "what it holds was not packed by Lockstep",
    )


def test_every_flipped_bit_is_found():
    for offset in range(len(DATA)):
        for bit in range(8):
            flipped = bytearray(DATA)
            flipped[offset] ^= 1 << bit
            check_corrupt(bytes(flipped))


def test_other_spaces_may_be_allowed_and_other_numbers_never():
    with pytest.raises(CorruptData, match="SHA-256"):
        unpack(DATA[:-1] + bytes([DATA[-1] ^ 1]), is_strict=False)  # the last byte of an array


def test_every_truncation_is_found():
    for num_bytes in range(len(DATA)):
        check_corrupt(DATA[:num_bytes])


@given(st.binary(min_size=1, max_size=20))
def test_appended_bytes_are_found(more):
    check_corrupt(DATA + more)


@given(st.integers(0, len(DATA)), st.binary(min_size=1, max_size=20))
def test_inserted_bytes_are_found(offset, more):
    data = DATA[:offset] + more + DATA[offset:]
    if data != DATA:
        check_corrupt(data)


def test_every_other_byte_in_place_of_a_space_is_found():
    """The header may end with spaces, which JSON ignores, whatever their kind."""
    for packed in [pack("x" * length) for length in range(8)]:
        offset = 7 + int.from_bytes(packed[:8], "little")
        if packed[offset : offset + 1] == b" ":
            break
    else:
        pytest.fail("no header ends with a space: this test shows nothing")
    for byte in {*range(256)} - {ord(" ")}:
        check_corrupt(packed[:offset] + bytes([byte]) + packed[offset + 1 :])


@given(TREES, st.data())
@settings(max_examples=200)
def test_a_byte_changed_in_any_tree_is_found(tree, data):
    packed = bytearray(pack(tree))
    offset = data.draw(st.integers(0, len(packed) - 1))
    packed[offset] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptData):
        unpack(bytes(packed))


@given(st.binary(max_size=60))
def test_other_bytes_are_corrupt(data):
    check_corrupt(data)


@pytest.mark.parametrize("inner", [b"", b"{}", b"[]", b"1", b'{"sha256":"","tree":"{}"}', b'{"sha256":1,"tree":2}'])
def test_safetensors_files_of_others_are_corrupt(inner):
    from safetensors.numpy import save

    check_corrupt(save({"W": np.zeros(2, np.float32)}))
    check_corrupt(save({"W": np.zeros(2, np.float32)}, {"lockstep": inner.decode()}))


def test_a_header_that_would_take_much_memory_is_neither_packed_nor_unpacked(monkeypatch):
    """Each of its bytes may become a Python object of thirty."""
    packed = pack({"step": 3})
    monkeypatch.setattr(serialization, "MAX_HEADER", 50)
    with pytest.raises(CorruptData):
        unpack(packed, is_strict=False)
    with pytest.raises(NotSerializable, match="bytes besides arrays, more than 50"):
        pack({"step": 3})
