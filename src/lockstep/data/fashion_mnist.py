"""Fashion-MNIST: its four files and their hashes, and the small sample of it that ships with Lockstep."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from lockstep.core.errors import DataError
from lockstep.core.layout import Array
from lockstep.data.arrays import labelled_dataset
from lockstep.data.dataset import Dataset
from lockstep.data.idx import check_labels, parse_idx, unpack
from lockstep.data.npz import read_npz

MINI = Path(__file__).with_name("fashion-mnist-mini.npz")
NUM_CLASSES = 10


class IdxFile(NamedTuple):
    """One of the four files. The hash is that of the unpacked bytes: the .gz differ from source to source."""

    name: str
    num_dims: int
    sha256: str


FILES = (
    IdxFile("train-images-idx3-ubyte", 3, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    IdxFile("train-labels-idx1-ubyte", 1, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    IdxFile("t10k-images-idx3-ubyte", 3, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    IdxFile("t10k-labels-idx1-ubyte", 1, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
)


def find_in(folder: Path, file: IdxFile) -> Path | None:
    """Where `folder` has the file, packed or not."""
    candidates = (folder / f"{file.name}.gz", folder / file.name)
    return next((path for path in candidates if os.path.isfile(path)), None)  # False, not an error, for odd names


def read_verified(path: Path, file: IdxFile) -> Array:
    """The array in the file at `path`, if its unpacked bytes are Fashion-MNIST's."""
    content = unpack(path)
    array = parse_idx(content, file.num_dims, str(path))
    if file.num_dims == 1:
        check_labels(array, NUM_CLASSES, str(path))
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise DataError(
            f"{path} is not Fashion-MNIST's {file.name}: its bytes hash to {found[:12]}..., not {file.sha256[:12]}.... "
            f"Remove it and fetch it again, or train on other data from a .npz file."
        )
    return array


def read_folder(folder: Path) -> Dataset:
    """Fashion-MNIST from the four files in `folder`."""
    arrays = []
    for file in FILES:
        path = find_in(folder, file)
        if path is None:
            raise DataError(f"{folder} has no {file.name}.gz. Leave --data-dir out to download it.")
        arrays.append(read_verified(path, file))
    return labelled_dataset("fashion-mnist", *arrays)


def read_mini() -> Dataset:
    """2,000 training and 500 test images, as many of each class: needs no network."""
    return read_npz(MINI, "fashion-mnist-mini")
