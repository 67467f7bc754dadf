"""IDX files: what is read, and what is refused in a sentence that names the file."""

import gzip

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.core.errors import DataError
from lockstep.data import idx
from lockstep.data.idx import check_labels, parse_idx, unpack

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
HEADER = bytes.fromhex("00000803 00000002 00000003 00000004")
CONTENT = HEADER + bytes(range(24))
PACKED = gzip.compress(CONTENT, mtime=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("idx") / "images-idx3-ubyte"


def read(path, content, num_dims=3):
    path.write_bytes(content)
    return parse_idx(unpack(path), num_dims, str(path))


def refusal(path, content, num_dims=3):
    with pytest.raises(DataError) as refused:
        read(path, content, num_dims)
    sentence = str(refused.value)
    assert str(path) in sentence
    assert sentence.endswith(".")
    return sentence


@pytest.mark.parametrize("content", [CONTENT, PACKED], ids=["plain", "gzip"])
def test_a_file_gives_its_array_packed_or_not(path, content):
    array = read(path, content)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, IMAGES)


def test_the_array_may_be_written_to(path):
    array = read(path, CONTENT)
    array[0, 0, 0] = 7
    assert array[0, 0, 0] == 7


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@given(array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)))
@settings(deadline=None, max_examples=50)
def test_any_array_comes_back_as_it_was_written(path, idx_bytes, pack, array):
    found = read(path, pack(idx_bytes(array)), array.ndim)
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "magic",
    ["00000d03", "00000903", "00010803", "01000803", "89504e47", "504b0304"],
    ids=["floats", "signed bytes", "second byte", "first byte", "PNG", "zip"],
)
def test_another_magic_number_is_refused(path, magic):
    sentence = refusal(path, bytes.fromhex(magic) + CONTENT[4:])
    assert f"starts with the magic number 0x{magic}" in sentence
    assert "with 3 dimensions with 0x00000803" in sentence


def test_labels_in_place_of_images_are_refused(path, idx_bytes):
    assert "magic number 0x00000801" in refusal(path, idx_bytes(np.arange(10)))


def test_images_in_place_of_labels_are_refused(path):
    assert "with 1 dimension with 0x00000801" in refusal(path, CONTENT, num_dims=1)


@pytest.mark.parametrize("num_bytes", range(4))
def test_a_file_shorter_than_a_magic_number_is_refused(path, num_bytes):
    assert f"has {num_bytes} bytes: too short for an IDX file" in refusal(path, CONTENT[:num_bytes])


@pytest.mark.parametrize("num_bytes", range(4, len(HEADER)))
def test_a_truncated_header_is_refused(path, num_bytes):
    sentence = refusal(path, CONTENT[:num_bytes])
    assert sentence == f"{path} ends inside its header, after {num_bytes} bytes. It is truncated."


@pytest.mark.parametrize("num_bytes", [len(HEADER), len(HEADER) + 1, len(CONTENT) - 1])
def test_a_truncated_body_is_refused(path, num_bytes):
    sentence = refusal(path, CONTENT[:num_bytes])
    assert sentence == (f"{path} announces 2 x 3 x 4 = 24 bytes and holds {num_bytes - len(HEADER)}. It is truncated.")


def test_a_file_that_is_too_long_is_refused(path):
    assert refusal(path, CONTENT + b"!") == f"{path} announces 2 x 3 x 4 = 24 bytes and holds 25. It is too long."


def test_a_forged_header_is_refused_before_memory_is_allocated(path):
    assert "It is truncated." in refusal(path, HEADER[:4] + b"\xff" * 12)


def test_no_images_of_a_forged_size_are_refused(path):
    sentence = refusal(path, HEADER[:4] + bytes(4) + b"\xff" * 8)
    assert "announces 0 x 4294967295 x 4294967295 bytes, which no dataset of this kind has" in sentence


@pytest.mark.parametrize("num_bytes", range(2, len(PACKED)))
def test_a_truncated_gzip_file_is_refused(path, num_bytes):
    sentence = refusal(path, PACKED[:num_bytes])
    assert f"{path} is a damaged gzip file (" in sentence
    assert sentence.endswith("Remove it and fetch it again.")


@pytest.mark.parametrize("position", [-1, -5, 2, 12], ids=["length", "checksum", "method", "data"])
def test_a_corrupt_gzip_file_is_refused(path, position):
    corrupt = bytearray(PACKED)
    corrupt[position] ^= 0xFF
    assert "is a damaged gzip file (" in refusal(path, bytes(corrupt))


def test_bytes_after_a_gzip_file_are_refused(path):
    assert "is a damaged gzip file (" in refusal(path, PACKED + b"rubbish")


@pytest.mark.parametrize("content", [CONTENT, PACKED], ids=["plain", "gzip"])
def test_a_file_that_unpacks_to_too_much_is_refused(path, monkeypatch, content):
    monkeypatch.setattr(idx, "MAX_BYTES", len(CONTENT) - 1)
    assert f"unpacks to more than {len(CONTENT) - 1} bytes" in refusal(path, content)
    monkeypatch.setattr(idx, "MAX_BYTES", len(CONTENT))
    np.testing.assert_array_equal(read(path, content), IMAGES)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError) as refused:
        unpack(tmp_path / "nowhere")
    assert str(refused.value) == f"{tmp_path / 'nowhere'} cannot be read: No such file or directory."


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError) as refused:
        unpack(tmp_path)
    assert str(refused.value) == f"{tmp_path} cannot be read: Is a directory."


def array_or_sentence(path, content, num_dims=3):
    try:
        return read(path, content, num_dims)
    except DataError as refused:
        return str(refused)


changes = st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), max_size=4)


@pytest.mark.parametrize("content", [CONTENT, PACKED], ids=["plain", "gzip"])
@given(changes=changes, num_cut=st.just(0) | st.integers(0, len(PACKED)))
@example(changes=[], num_cut=0)
@settings(deadline=None, max_examples=300)
def test_damage_gives_an_array_or_a_sentence_and_never_another_exception(path, content, changes, num_cut):
    damaged = bytearray(content[: len(content) - num_cut])
    for position, flip in changes:
        if damaged:
            damaged[position % len(damaged)] ^= flip
    found = array_or_sentence(path, bytes(damaged))
    if isinstance(found, str):
        assert str(path) in found
        assert bytes(damaged) != content
    else:
        assert found.ndim == 3
        assert found.dtype == np.uint8


@given(content=st.binary(max_size=64) | st.binary(max_size=64).map(lambda end: b"\x1f\x8b" + end))
@settings(deadline=None)
def test_any_bytes_give_an_array_or_a_sentence(path, content):
    for num_dims in (1, 3):
        found = array_or_sentence(path, content, num_dims)
        assert str(path) in found if isinstance(found, str) else found.ndim == num_dims


def test_labels_of_all_classes_are_accepted_and_so_are_no_labels():
    check_labels(np.arange(10, dtype=np.uint8), 10, "labels")
    check_labels(np.zeros(0, np.uint8), 10, "labels")


@pytest.mark.parametrize("last", [9, 10, 255])
def test_a_label_out_of_range_is_refused_with_its_number(last):
    labels = np.array([0, 9, 10, last], np.uint8)
    with pytest.raises(DataError) as refused:
        check_labels(labels, 10, "some/labels")
    assert str(refused.value) == "some/labels: label 2 is 10, and the 10 classes are 0 to 9."
