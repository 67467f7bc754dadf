"""`.npz` files with X_train, y_train, X_test, y_test. Pickled arrays are refused."""

import math
import zipfile
from pathlib import Path

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.layout import Array
from lockstep.data.arrays import labelled_dataset
from lockstep.data.dataset import Dataset

MAX_UNPACKED, MAX_RATIO = 1 << 26, 100  # bytes, and bytes for each compressed one, of what is unpacked without a word
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
                _check_sizes(archive, path)
                parts = [_array(archive, n) for n in NAMES]
    except DataError:
        raise
    except FileNotFoundError as missing_file:
        raise DataError(f"There is no file {path}. Check the path (--data).") from missing_file
    except Exception as bad:  # damaged or forged bytes: zipfile, zlib, tokenize and numpy raise a dozen kinds of error
        raise DataError(f"{path} cannot be read as a .npz file of plain arrays: {bad}.") from bad
    return labelled_dataset(name, *parts)


def _check_sizes(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuses an archive that unpacks to a hundred times its size: all of it would lie in memory, labels as int64."""
    infos = [archive.getinfo(f"{name}.npy") for name in NAMES]
    unpacked, packed = sum(info.file_size for info in infos), sum(info.compress_size for info in infos)
    if unpacked > MAX_UNPACKED and unpacked > MAX_RATIO * max(packed, 1):
        largest = max(infos, key=lambda info: info.file_size)
        raise DataError(
            f"{path}: {largest.filename.removesuffix('.npy')} would unpack to {largest.file_size:,} bytes from "
            f"{largest.compress_size:,}. If that is right, save it uncompressed: numpy.savez."
        )


def _array(archive: zipfile.ZipFile, name: str) -> Array:
    info = archive.getinfo(f"{name}.npy")
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
