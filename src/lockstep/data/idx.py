"""The IDX format of MNIST and Fashion-MNIST, gzip or plain: magic number, dimensions, bytes.

0  0  type  dims | size of each dimension, 4 bytes, big-endian | the bytes, last dimension fastest
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from lockstep.core.errors import DataError
from lockstep.core.layout import Array

UNSIGNED_BYTE = 0x08
MAX_BYTES = 1 << 27  # real files are smaller than half of it; a forged one could unpack to any size


def unpack(path: Path) -> bytes:
    """The bytes of a file, unpacked if it is gzip."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            content = (gzip.GzipFile(fileobj=raw) if packed else raw).read(MAX_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as damaged:
        raise DataError(f"{path} is a damaged gzip file ({damaged}). Remove it and fetch it again.") from damaged
    except OSError as unreadable:
        raise DataError(f"{path} cannot be read: {unreadable.strerror}.") from unreadable
    if len(content) > MAX_BYTES:
        raise DataError(f"{path} unpacks to more than {MAX_BYTES} bytes, which no dataset of this kind has.")
    return content


def parse_idx(content: bytes, num_dims: int, name: str) -> Array:
    """The array in an IDX file's unpacked bytes. `num_dims` is 3 for images, 1 for labels."""
    if len(content) < 4:
        raise DataError(f"{name} has {len(content)} bytes: too short for an IDX file. It may be truncated.")
    magic = bytes([0, 0, UNSIGNED_BYTE, num_dims])
    if content[:4] != magic:
        raise DataError(
            f"{name} starts with the magic number 0x{content[:4].hex()}, and an IDX file of bytes with {num_dims} "
            f"dimension{'s' * (num_dims > 1)} with 0x{magic.hex()}. It is another kind of file."
        )
    header = 4 + 4 * num_dims
    if len(content) < header:
        raise DataError(f"{name} ends inside its header, after {len(content)} bytes. It is truncated.")
    shape = struct.unpack(f">{num_dims}I", content[4:header])
    announced, expected, found = " x ".join(map(str, shape)), math.prod(shape), len(content) - header
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise DataError(f"{name} announces {announced} = {expected} bytes and holds {found}. It is {what}.")
    if math.prod(max(size, 1) for size in shape) > MAX_BYTES:  # numpy cannot make 0 x 2**32 x 2**32 either
        raise DataError(f"{name} announces {announced} bytes, which no dataset of this kind has.")
    return np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(shape)


def check_labels(labels: Array, num_classes: int, name: str) -> None:
    """Refuses labels that are not 0 to `num_classes` - 1."""
    if labels.size and labels.max() >= num_classes:
        at = int(np.argmax(labels >= num_classes))
        raise DataError(
            f"{name}: label {at} is {labels[at]}, and the {num_classes} classes are 0 to {num_classes - 1}."
        )
