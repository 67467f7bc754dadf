"""Datasets by name, or from a file."""

import hashlib

import numpy as np
import pytest

from lockstep.core.errors import ConfigError, DataError
from lockstep.data import DATASETS, Dataset, load_dataset


def test_the_mini_set_is_there_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_dataset("fashion-mnist-mini").X_train.shape == (2000, 1, 28, 28)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_ends_in_npz_is_a_file(tmp_path):
    X, y = np.zeros((4, 3), np.float32), np.arange(4)
    np.savez(tmp_path / "mine.npz", X_train=X, y_train=y, X_test=X, y_test=y)
    data = load_dataset(str(tmp_path / "mine.npz"))
    assert data.name == str(tmp_path / "mine.npz")
    assert data.num_classes == 4


def test_the_largest_label_of_both_parts_gives_the_number_of_classes(tmp_path):
    X = np.zeros((2, 3), np.float32)
    np.savez(tmp_path / "mine.npz", X_train=X, y_train=np.array([0, 1]), X_test=X, y_test=np.array([6, 0]))
    assert load_dataset(str(tmp_path / "mine.npz")).num_classes == 7


def test_an_unknown_name_is_refused_with_the_known_names():
    with pytest.raises(ConfigError) as refused:
        load_dataset("fashion-minst")
    assert str(refused.value) == (
        "There is no dataset (or .npz file) called 'fashion-minst'. Did you mean 'fashion-mnist'? "
        f"There are: {', '.join(sorted(DATASETS))}."
    )


def test_the_mini_set_from_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError) as refused:
        load_dataset("fashion-mnist-mini", tmp_path)
    assert str(refused.value) == ("fashion-mnist-mini ships with Lockstep: leave --data-dir out, or use fashion-mnist.")


def test_fashion_mnist_is_read_from_the_folder_that_the_user_names(tmp_path, tiny_fashion):
    for name, content in tiny_fashion.items():
        (tmp_path / name).write_bytes(content)
    data = load_dataset("fashion-mnist", tmp_path)
    assert (data.name, data.X_train.shape) == ("fashion-mnist", (12, 1, 8, 9))


def test_a_folder_without_fashion_mnist_is_refused(tmp_path):
    with pytest.raises(DataError) as refused:
        load_dataset("fashion-mnist", tmp_path)
    assert str(refused.value).startswith(f"{tmp_path} does not have Fashion-MNIST.")


def test_a_folder_with_an_impossible_name_is_refused(tmp_path):
    with pytest.raises(DataError) as refused:
        load_dataset("fashion-mnist", tmp_path / ("a" * 300))
    assert str(refused.value) == (
        f"{tmp_path / ('a' * 300)} cannot be read: File name too long. Name a folder that has Fashion-MNIST's files."
    )


# --- the hash of a dataset

SMALL = {
    "X_train": np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2),
    "y_train": np.array([0, 1, 2]),
    "X_test": np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2),
    "y_test": np.array([2, 0]),
}


def test_the_hash_is_that_of_all_samples_and_labels_whatever_the_name():
    kinds = ",".join(f"{array.dtype}{array.shape}" for array in SMALL.values()).encode()
    content = kinds + b"".join(array.tobytes() for array in SMALL.values())
    assert Dataset("one", **SMALL).sha256 == Dataset("other", **SMALL).sha256 == hashlib.sha256(content).hexdigest()


def test_the_same_bytes_in_another_shape_are_another_hash():
    turned = {**SMALL, "X_train": SMALL["X_train"].swapaxes(-1, -2).reshape(len(SMALL["X_train"]), -1)}
    flat = {**SMALL, "X_train": SMALL["X_train"].reshape(len(SMALL["X_train"]), -1)}
    assert len({Dataset("mine", **arrays).sha256 for arrays in (SMALL, flat, turned)}) == 3


@pytest.mark.parametrize("name", SMALL)
def test_one_other_entry_is_another_hash(name):
    other = SMALL[name].copy()
    other.flat[-1] += 1
    assert Dataset("mine", **{**SMALL, name: other}).sha256 != Dataset("mine", **SMALL).sha256


def test_the_hash_does_not_depend_on_the_file_that_the_arrays_came_in(tmp_path):
    np.savez(tmp_path / "mine.npz", **SMALL)
    packed = {**SMALL, "X_train": np.asfortranarray(SMALL["X_train"]), "y_test": SMALL["y_test"].astype(">i2")}
    np.savez_compressed(tmp_path / "packed.npz", **packed)
    hashes = {load_dataset(str(tmp_path / name)).sha256 for name in ("mine.npz", "packed.npz")}
    assert hashes == {Dataset("mine", **SMALL).sha256}


def test_the_mini_set_is_always_the_same():
    assert load_dataset("fashion-mnist-mini").sha256 == (
        "8df38dac5bda0ef0cce643d8647c2cb5f675ebdba51bf06bfd864984f0188dfc"
    )
