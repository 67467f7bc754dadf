"""`.npz` files with X_train, y_train, X_test, y_test. Pickled arrays are refused."""

import math
import zipfile
from pathlib import Path

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.layout import Array
from lockstep.data.arrays import labelled_dataset
from lockstep.data.dataset import Dataset

MAX_UNPACKED, MAX_RATIO = 1 << 28, 100  # bytes, and bytes for each compressed one, of what is unpacked without a word
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
    info = archive.getinfo(f"{name}.npy")
    if info.file_size > MAX_UNPACKED and info.file_size > MAX_RATIO * max(info.compress_size, 1):
        raise DataError(
            f"{archive.filename}: {name} would unpack to {info.file_size:,} bytes from {info.compress_size:,}. If that "
            f"is right, save it uncompressed: numpy.savez."
        )
    with archive.open(info) as member:
        major, _ = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(member)
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != info.file_size - member.tell():
            raise ValueError(f"{name} has objects, or another size than its header says")
        member.seek(0)
        array: Array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):  # its checksum is compared at its end only
            raise DataError(f"{archive.filename}: {name} has bytes after its last number. The file is damaged.")
        return array
