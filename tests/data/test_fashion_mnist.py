"""The sample that ships with Lockstep, and Fashion-MNIST from a folder: right to the byte, or refused."""

import gzip

import numpy as np
import pytest

from lockstep.core.errors import DataError
from lockstep.data.fashion_mnist import FILES, MINI, find_in, read_folder, read_mini, read_verified


def test_the_mini_set_has_2000_and_500_images_of_bytes():
    mini = read_mini()
    assert mini.name == "fashion-mnist-mini"
    assert (mini.X_train.shape, mini.y_train.shape) == ((2000, 1, 28, 28), (2000,))
    assert (mini.X_test.shape, mini.y_test.shape) == ((500, 1, 28, 28), (500,))
    assert (mini.X_train.dtype, mini.X_test.dtype) == (np.uint8, np.uint8)
    assert (mini.sample_shape, mini.num_classes) == ((1, 28, 28), 10)


def test_the_mini_set_has_as_many_images_of_each_class_and_no_image_twice():
    mini = read_mini()
    assert np.bincount(mini.y_train).tolist() == [200] * 10
    assert np.bincount(mini.y_test).tolist() == [50] * 10
    assert len({image.tobytes() for image in np.concatenate([mini.X_train, mini.X_test])}) == 2500


def test_the_mini_set_carries_its_licence():
    with np.load(MINI, allow_pickle=False) as arrays:
        notice = str(arrays["license"])
    assert "Zalando SE" in notice
    assert "MIT License" in notice


def test_the_mini_set_is_small():
    assert MINI.stat().st_size < 1_500_000


@pytest.fixture
def folder(tmp_path, tiny_fashion):
    """The four files of a Fashion-MNIST of 12 + 6 images."""
    for name, content in tiny_fashion.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def sentence_about(folder):
    with pytest.raises(DataError) as refused:
        read_folder(folder)
    return str(refused.value)


def test_the_four_files_are_read(folder, tiny_fashion):
    data = read_folder(folder)
    assert data.name == "fashion-mnist"
    assert (data.X_train.shape, data.X_test.shape) == ((12, 1, 8, 9), (6, 1, 8, 9))
    for array, content in zip(
        (data.X_train, data.y_train, data.X_test, data.y_test), tiny_fashion.values(), strict=True
    ):
        assert gzip.decompress(content).endswith(array.astype(np.uint8).tobytes())


def test_unpacked_files_are_read_as_well(folder):
    packed = read_folder(folder)
    for path in list(folder.iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = read_folder(folder)
    assert plain.X_train.tobytes() == packed.X_train.tobytes()
    assert plain.y_test.tobytes() == packed.y_test.tobytes()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_missing_file_is_named(folder, file):
    (folder / f"{file.name}.gz").unlink()
    assert sentence_about(folder) == f"{folder} has no {file.name}.gz. Leave --data-dir out to download it."


def test_a_folder_in_place_of_a_file_counts_as_missing(tmp_path):
    (tmp_path / f"{FILES[0].name}.gz").mkdir()
    assert find_in(tmp_path, FILES[0]) is None


def test_training_and_test_labels_swapped_are_refused(folder):
    train, test = folder / f"{FILES[1].name}.gz", folder / f"{FILES[3].name}.gz"
    train_labels = train.read_bytes()
    train.write_bytes(test.read_bytes())
    test.write_bytes(train_labels)
    assert f"{train} is not Fashion-MNIST's {FILES[1].name}: its bytes hash to " in sentence_about(folder)


def test_one_other_pixel_is_refused(folder):
    path = folder / f"{FILES[2].name}.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[-1] ^= 1
    path.write_bytes(gzip.compress(content))
    assert f"{path} is not Fashion-MNIST's {FILES[2].name}" in sentence_about(folder)


def test_labels_out_of_range_are_refused(folder, idx_bytes):
    path = folder / f"{FILES[1].name}.gz"
    path.write_bytes(idx_bytes(np.arange(12)))
    assert f"{path}: label 10 is 10, and the 10 classes are 0 to 9" in sentence_about(folder)


def test_images_in_place_of_labels_are_refused(folder):
    path = folder / f"{FILES[1].name}.gz"
    path.write_bytes((folder / f"{FILES[0].name}.gz").read_bytes())
    assert f"{path} starts with the magic number 0x00000803" in sentence_about(folder)


@pytest.mark.parametrize(("number", "shape"), [(1, (60_000,)), (2, (10_000, 28, 28)), (3, (10_000,))])
def test_mnist_or_anything_else_of_the_right_shape_is_refused(tmp_path, idx_bytes, number, shape):
    file, path = FILES[number], tmp_path / FILES[number].name
    path.write_bytes(idx_bytes(np.random.RandomState(0).randint(0, 10, shape)))
    with pytest.raises(DataError) as refused:
        read_verified(path, file)
    assert f"{path} is not Fashion-MNIST's {file.name}" in str(refused.value)
    assert f"not {file.sha256[:12]}..." in str(refused.value)
    assert "Remove it and fetch it again" in str(refused.value)
