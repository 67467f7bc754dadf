"""Datasets: by name, or from a `.npz` file."""

from pathlib import Path

from lockstep.core.errors import DataError
from lockstep.core.names import DATASETS
from lockstep.core.registry import pick
from lockstep.data.dataset import Dataset
from lockstep.data.fashion_mnist import read_folder, read_mini
from lockstep.data.npz import read_npz
from lockstep.data.sources import Progress, find_or_fetch, no_progress

__all__ = ["DATASETS", "Dataset", "load_dataset"]


def load_dataset(name: str, data_dir: Path | None = None, progress: Progress = no_progress) -> Dataset:
    """The dataset called `name`, or in the `.npz` file at `name`. Fetches what is not on this machine.

    >>> load_dataset("fashion-mnist-mini").X_train.shape
    (2000, 1, 28, 28)
    """
    if name.endswith(".npz"):
        return read_npz(Path(name), name)
    pick(DATASETS, name, "dataset (or .npz file)")
    if name == "fashion-mnist-mini":
        if data_dir is not None:
            raise DataError("fashion-mnist-mini ships with Lockstep: leave --data-dir out, or use fashion-mnist.")
        return read_mini()
    return read_folder(find_or_fetch(data_dir, progress))
