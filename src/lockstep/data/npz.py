"""`.npz` files with X_train, y_train, X_test, y_test. Pickled arrays are refused."""

import zipfile
from pathlib import Path

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.layout import Array
from lockstep.data.arrays import labelled_dataset
from lockstep.data.dataset import Dataset

NAMES = ("X_train", "y_train", "X_test", "y_test")


def read_npz(path: Path, name: str) -> Dataset:
    """The dataset in the file at `path`. Not by `numpy.load`, which leaves a damaged zip file open."""
    try:
        with path.open("rb") as file:
            if file.read(6) == b"\x93NUMPY":
                raise DataError(f"{path} holds one array; a dataset needs {', '.join(NAMES)}. Use numpy.savez.")
            with zipfile.ZipFile(file) as archive:
                missing = [n for n in NAMES if f"{n}.npy" not in archive.namelist()]
                if missing:
                    raise DataError(f"{path} has no {', '.join(missing)}. It needs {', '.join(NAMES)}.")
                parts = [_array(archive, n) for n in NAMES]
    except DataError:
        raise
    except FileNotFoundError as missing_file:
        raise DataError(f"There is no file {path}. Check the path (--data).") from missing_file
    except Exception as bad:  # damaged or forged bytes: zipfile, zlib, tokenize and numpy raise a dozen kinds of error
        raise DataError(f"{path} cannot be read as a .npz file of plain arrays: {bad}.") from bad
    return labelled_dataset(name, *parts)


def _array(archive: zipfile.ZipFile, name: str) -> Array:
    with archive.open(f"{name}.npy") as member:
        array: Array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):  # its checksum is compared at its end only
            raise DataError(f"{archive.filename}: {name} has bytes after its last number. The file is damaged.")
        return array
