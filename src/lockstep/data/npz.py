"""`.npz` files with X_train, y_train, X_test, y_test. Pickled arrays are refused."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from lockstep.data.dataset import Dataset, checked_dataset
from lockstep.errors import DataError

NAMES = ("X_train", "y_train", "X_test", "y_test")


def read_npz(path: Path, name: str) -> Dataset:
    """The data set in the file at `path`."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds one array; a data set needs {', '.join(NAMES)}. Use numpy.savez.")
            missing = [n for n in NAMES if n not in arrays]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}. It needs {', '.join(NAMES)}.")
            parts = [arrays[n] for n in NAMES]
    except FileNotFoundError as missing_file:
        raise DataError(f"There is no file {path}.") from missing_file
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError) as bad:
        raise DataError(f"{path} cannot be read as a .npz file of plain arrays: {bad}.") from bad
    return checked_dataset(name, *parts)
