""".npz files: what is read, and what is refused; a file may come from anyone."""

import gc
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import DataError
from lockstep.data.npz import read_npz

GOOD = {
    "X_train": np.arange(3 * 2 * 2, dtype=np.uint8).reshape(3, 1, 2, 2),
    "y_train": np.array([0, 1, 2]),
    "X_test": np.arange(2 * 2 * 2, dtype=np.uint8).reshape(2, 1, 2, 2),
    "y_test": np.array([2, 0], np.uint8),
}


def npz(save=np.savez, **changes):
    """The bytes of a good file, apart from `changes`; an array that is None is left out."""
    arrays = {name: array for name, array in {**GOOD, **changes}.items() if array is not None}
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def npz_of_members(**changes):
    """A good zip file, apart from the bytes of some members: the checksums are right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(npz())) as good, zipfile.ZipFile(file, "w") as other:
        for name in GOOD:
            other.writestr(f"{name}.npy", changes.get(name, good.read(f"{name}.npy")))
    return file.getvalue()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("npz") / "mine.npz"


def read(path, content):
    path.write_bytes(content)
    return read_npz(path, "mine.npz")


def refusal(path, content):
    with pytest.raises(DataError) as refused:
        read(path, content)
    assert "mine.npz" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_good_file_is_read(path, save):
    data = read(path, npz(save))
    assert data.name == "mine.npz"
    assert (data.sample_shape, data.num_classes) == ((1, 2, 2), 3)
    for name, array in GOOD.items():
        np.testing.assert_array_equal(getattr(data, name), array)
    assert (data.X_train.dtype, data.X_test.dtype) == (np.uint8, np.uint8)
    assert (data.y_train.dtype, data.y_test.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", ">f8"])
def test_floats_become_float32_with_the_same_values(path, dtype):
    data = read(path, npz(X_train=np.full((3, 4), 1.5, dtype), X_test=np.full((2, 4), -2.5, dtype)))
    assert data.X_train.tobytes() == np.full((3, 4), 1.5, "<f4").tobytes()
    assert data.X_test.tobytes() == np.full((2, 4), -2.5, "<f4").tobytes()


def test_images_without_a_channel_dimension_get_one(path):
    data = read(path, npz(X_train=GOOD["X_train"][:, 0], X_test=GOOD["X_test"][:, 0]))
    assert data.X_train.shape == (3, 1, 2, 2)
    np.testing.assert_array_equal(data.X_train, GOOD["X_train"])


def test_vectors_stay_vectors(path):
    assert read(path, npz(X_train=np.zeros((3, 5)), X_test=np.zeros((2, 5)))).sample_shape == (5,)


def test_arrays_in_fortran_order_are_read_in_logical_order(path):
    data = read(path, npz(X_train=np.asfortranarray(GOOD["X_train"])))
    assert data.X_train.flags.c_contiguous
    np.testing.assert_array_equal(data.X_train, GOOD["X_train"])


def test_what_else_is_in_the_file_does_not_matter(path):
    assert read(path, npz(license=np.array("free"))).num_classes == 3


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_array_is_named(path, name):
    assert f"has no {name}. It needs X_train, y_train, X_test, y_test." in refusal(path, npz(**{name: None}))


def test_all_missing_arrays_are_named(path):
    assert "has no y_train, y_test." in refusal(path, npz(y_train=None, y_test=None))


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_the_bomb_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", GOOD)
def test_pickled_objects_are_refused_and_not_executed(path, tmp_path, name):
    bombs = np.array([Bomb(tmp_path / "mark")] * len(GOOD[name]), dtype=object)
    refusal(path, npz(**{name: bombs}))
    assert not (tmp_path / "mark").exists()


def test_a_pickle_is_refused_and_not_executed(path, tmp_path):
    refusal(path, pickle.dumps(Bomb(tmp_path / "mark")))
    assert not (tmp_path / "mark").exists()


def test_a_single_array_is_refused(path):
    file = io.BytesIO()
    np.save(file, GOOD["X_train"])
    assert "holds one array; a dataset needs X_train" in refusal(path, file.getvalue())


@pytest.mark.parametrize("content", [b"", b"X", b"some,text\n" * 20, bytes(100)])
def test_another_kind_of_file_is_refused(path, content):
    assert "cannot be read as a .npz file" in refusal(path, content)


def test_the_error_does_not_advise_allow_pickle(path):
    assert "allow_pickle" not in refusal(path, b"some,text\n" * 20)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError) as refused:
        read_npz(tmp_path / "nowhere.npz", "nowhere.npz")
    assert str(refused.value) == f"There is no file {tmp_path / 'nowhere.npz'}. Check the path (--data)."


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read as a \.npz file"):
        read_npz(tmp_path, "folder.npz")


@pytest.mark.parametrize("dtype", ["bool", "complex64", "U1", "S1", "M8[s]"])
def test_samples_of_another_type_are_refused(path, dtype):
    X = GOOD["X_test"].astype(dtype)
    types = "Use uint8, float32, or int64 for tokens."
    assert refusal(path, npz(X_test=X)) == f"mine.npz: the test samples are {X.dtype}. {types}"


def test_tokens_are_integers_and_their_labels_the_next_ones(path):
    tokens = np.arange(12, dtype=np.int32).reshape(4, 3)
    path.write_bytes(npz(X_train=tokens, y_train=tokens + 1, X_test=tokens, y_test=tokens + 1))
    data = read_npz(path, "mine.npz")
    assert (data.X_train.dtype, data.X_train.shape, data.y_train.shape) == (np.int64, (4, 3), (4, 3))
    assert (data.num_tokens, data.num_classes) == (12, 13)
    wrong = npz(X_train=tokens - 1, y_train=tokens, X_test=tokens, y_test=tokens)
    assert refusal(path, wrong) == "mine.npz: the training tokens go from -1 to 10. Use 0 to 2147483647."


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bool",
        "complex64",
        "U1",
        "m8[s]",
    ],
)
def test_labels_of_another_type_are_refused(path, dtype):
    y = GOOD["y_train"].astype(dtype)
    assert refusal(path, npz(y_train=y)) == f"mine.npz: the training labels are {y.dtype}. Use integers from 0 on."


def test_more_labels_than_samples_are_refused(path):
    assert refusal(path, npz(y_train=np.zeros(4, int))) == (
        "mine.npz: samples and targets of the training data have lengths [3, 4]. Give samples, each with a target."
    )


def test_no_samples_are_refused(path):
    assert refusal(path, npz(X_test=np.zeros((0, 1, 2, 2), np.uint8), y_test=np.zeros(0, int))) == (
        "mine.npz: samples and targets of the test data have lengths [0]. Give samples, each with a target."
    )


@pytest.mark.parametrize("bad", [{"X_train": np.zeros(3)}, {"y_train": np.eye(3, dtype=int)}, {"y_train": np.array(1)}])
def test_a_wrong_number_of_dimensions_is_refused_with_both_shapes(path, bad):
    sentence = refusal(path, npz(**bad))
    X, y = {**GOOD, **bad}["X_train"], {**GOOD, **bad}["y_train"]
    assert f"mine.npz: the training samples have shape {X.shape}, the labels {y.shape}." in sentence


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["X_train", "X_test"])
def test_numbers_that_are_not_finite_are_refused(path, name, bad):
    X = GOOD[name].astype(np.float64)
    X[-1, -1, -1, -1] = bad
    others = {other: GOOD[other].astype(np.float64) for other in ("X_train", "X_test")}
    kind = {"X_train": "training", "X_test": "test"}[name]
    assert f"mine.npz: the {kind} samples hold NaN" in refusal(path, npz(**{**others, name: X}))


def test_numbers_too_large_for_float32_are_refused(path):
    assert "the training samples hold NaN, or numbers that are infinite in float32" in refusal(
        path, npz(X_train=np.full((3, 1, 2, 2), 1e300))
    )


@pytest.mark.parametrize(("y", "span"), [([-1, 0, 5], "-1 to 5"), ([0, 70_000, 1], "0 to 70000")])
def test_labels_out_of_range_are_refused(path, y, span):
    assert refusal(path, npz(y_train=np.array(y))) == f"mine.npz: the training labels go from {span}. Use 0 to 65535."


def test_training_and_test_samples_of_different_shape_are_refused(path):
    sentence = refusal(path, npz(X_test=np.zeros((2, 1, 2, 3), np.uint8)))
    assert (
        "a training sample is uint8 of shape (1, 2, 2), a test sample uint8 of shape (1, 2, 3). Make them the same"
        in sentence
    )


def test_bytes_and_floats_in_one_data_set_are_refused(path):
    for floats in ({"X_test": np.zeros((2, 1, 2, 2), np.float32)}, {"X_train": np.zeros((3, 1, 2, 2), np.float32)}):
        assert "Make them the same: bytes are divided by 255, other numbers are not." in refusal(path, npz(**floats))


def test_an_encrypted_file_is_refused(path):
    content = bytearray(npz())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # the flag in the central directory
    assert "encrypted" in refusal(path, bytes(content))


def test_a_member_that_is_no_array_is_refused(path):
    sentence = refusal(path, npz_of_members(X_train=b"not an array"))
    assert "cannot be read as a .npz file of plain arrays" in sentence
    assert "magic string" in sentence


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"}", b"("), (b"|u1", b",u1"), (b"'shape'", b"b'shap'")],
    ids=["TokenError", "SyntaxError", "TypeError"],
)
def test_a_forged_array_header_is_refused(path, old, new):
    with zipfile.ZipFile(io.BytesIO(npz())) as good:
        header = good.read("X_train.npy")
    assert old in header
    refusal(path, npz_of_members(X_train=header.replace(old, new, 1)))


def test_another_pixel_is_refused_by_its_checksum(path):
    content = bytearray(npz())
    content[content.index(GOOD["X_train"].tobytes())] ^= 1
    assert "cannot be read as a .npz file" in refusal(path, bytes(content))


SMALL = npz(np.savez_compressed)
changes = st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(1, 255)), max_size=4)


def data_or_sentence(path, content):
    try:
        return read(path, content)
    except DataError as refused:
        return str(refused)


@given(changes=changes, num_cut=st.just(0) | st.integers(0, len(SMALL)))
@settings(deadline=None, max_examples=300)
def test_damage_gives_a_data_set_or_a_sentence_and_no_other_exception_or_warning(path, changes, num_cut):
    damaged = bytearray(SMALL)
    for position, flip in changes:
        damaged[position] ^= flip
    damaged = bytes(damaged[: len(SMALL) - num_cut])
    found = data_or_sentence(path, damaged)
    if isinstance(found, str):
        assert "mine.npz" in found
        assert damaged != SMALL
    else:
        assert len(found.X_train) == len(found.y_train)
        assert len(found.X_test) == len(found.y_test)


def test_every_truncation_is_refused_and_no_file_is_left_open(path):
    for num_bytes in range(len(SMALL)):
        assert "cannot be read as a .npz file of plain arrays" in refusal(path, SMALL[:num_bytes])
    gc.collect()  # a file left open is reported here, not in another test
