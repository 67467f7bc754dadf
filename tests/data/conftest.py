"""Fixtures of the data tests: a writer of IDX files, and a Fashion-MNIST of a few hundred bytes."""

import gzip
import hashlib
import struct
from collections.abc import Callable

import numpy as np
import pytest

from lockstep.data import fashion_mnist, sources
from lockstep.data.fashion_mnist import IdxFile


@pytest.fixture(scope="session")
def idx_bytes() -> Callable[[np.ndarray], bytes]:
    """Writes an array as IDX, independently of the reader."""

    def write(array: np.ndarray) -> bytes:
        header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        return header + array.astype(np.uint8).tobytes()

    return write


@pytest.fixture
def tiny_fashion(monkeypatch: pytest.MonkeyPatch, idx_bytes: Callable[[np.ndarray], bytes]) -> dict[str, bytes]:
    """Four gzip files by name. For one test they are what Fashion-MNIST consists of: 12 + 6 images of 8 x 9."""
    random = np.random.RandomState(3)
    arrays = {
        "train-images-idx3-ubyte": random.randint(0, 256, (12, 8, 9)),
        "train-labels-idx1-ubyte": np.arange(12) % 10,
        "t10k-images-idx3-ubyte": random.randint(0, 256, (6, 8, 9)),
        "t10k-labels-idx1-ubyte": np.arange(6) % 10,
    }
    unpacked = {name: idx_bytes(array) for name, array in arrays.items()}
    files = tuple(IdxFile(n, arrays[n].ndim, hashlib.sha256(content).hexdigest()) for n, content in unpacked.items())
    monkeypatch.setattr(fashion_mnist, "FILES", files)
    monkeypatch.setattr(sources, "FILES", files)
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in unpacked.items()}
