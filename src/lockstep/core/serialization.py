"""A tree of plain values and arrays as bytes, and back: safetensors whose header holds the rest as JSON. No pickle.

Used for checkpoints and for messages between processes.
"""

import hashlib
import json
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from lockstep.core.layout import Array

KEY = "lockstep"  # of the JSON in the header; the only one, so that equal trees give equal bytes
MAX_HEADER = 1 << 24  # bytes: as Python objects, it may need thirty times as many
DTYPES = set(map(np.dtype, ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "<c8"]))


class NotSerializable(TypeError):
    """A tree holds something that is neither a plain value nor an array."""


class CorruptData(ValueError):
    """Bytes that no tree was packed into."""


def pack(tree: Any) -> bytes:
    """Plain values, lists, tuples, dicts and arrays as bytes; arrays are named by their path in the tree.

    >>> unpack(pack({"step": 3, "betas": (0.9, 0.999), 7: np.arange(2)}))
    {'step': 3, 'betas': (0.9, 0.999), 7: array([0, 1])}
    """
    arrays: dict[str, Array] = {}
    plain = json.dumps(_plain(tree, "", arrays), separators=(",", ":"))
    header = {"sha256": _sha256(plain, arrays), "tree": plain}
    packed = bytes(save(arrays, {KEY: json.dumps(header, separators=(",", ":"))}))
    if _header_length(packed) > MAX_HEADER:
        raise NotSerializable(f"it has {_header_length(packed):,} bytes besides arrays, more than {MAX_HEADER:,}")
    return packed


def unpack(data: bytes, is_strict: bool = True) -> Any:
    """The tree that was packed. If `is_strict`, any other bytes than those that `pack` makes of it are an error.

    >>> unpack(b"anything else")
    Traceback (most recent call last):
    lockstep.core.serialization.CorruptData: it is not a safetensors file
    """
    try:
        if _header_length(data) > MAX_HEADER:
            raise ValueError("a header that large was never packed")
        arrays = load(data)
    except Exception as problem:  # safetensors raises errors of several types
        raise CorruptData("it is not a safetensors file") from problem
    try:
        header = json.loads(data[8 : 8 + _header_length(data)])
        inner = json.loads(header["__metadata__"][KEY])
        if inner["sha256"] != _sha256(inner["tree"], arrays):
            raise CorruptData("its SHA-256 is not that of what it holds")
        tree = _tree(json.loads(inner["tree"]), arrays)
        if is_strict and pack(tree) != data:  # other spaces in the header, say
            raise ValueError("the same tree in other bytes")
    except CorruptData:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise CorruptData("what it holds was not packed by Lockstep") from problem
    return tree


def _header_length(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _sha256(plain: str, arrays: dict[str, Array]) -> str:
    """SHA-256 of the JSON, and of every array with its name, dtype and shape."""
    digest = hashlib.sha256(plain.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _plain(value: Any, path: str, arrays: dict[str, Array]) -> Any:
    """The value as JSON can hold it, its arrays moved to `arrays`."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.ndarray():
            if value.dtype.newbyteorder("<") not in DTYPES:
                raise NotSerializable(f"{path or 'it'} is an array of {value.dtype}")
            name = path or "array"
            while name in arrays or name == "__metadata__":  # {"a/b": ..., "a": {"b": ...}}
                name += "'"
            arrays[name] = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(value.shape)
            return {"$array": name}
        case list():
            return [_plain(entry, f"{path}/{number}", arrays) for number, entry in enumerate(value)]
        case tuple():
            return {"$tuple": [_plain(entry, f"{path}/{number}", arrays) for number, entry in enumerate(value)]}
        case dict():
            below = f"{path}/" if path else ""
            if all(isinstance(key, str) and key[:1] != "$" for key in value):
                return {key: _plain(entry, f"{below}{key}", arrays) for key, entry in value.items()}
            if all(isinstance(key, (str, int)) for key in value):
                return {"$pairs": [[key, _plain(entry, f"{below}{key!r}", arrays)] for key, entry in value.items()]}
    raise NotSerializable(f"{path or 'it'} is a {type(value).__name__}")


def _tree(plain: Any, arrays: dict[str, Array]) -> Any:
    match plain:
        case {"$array": name, **rest} if not rest:
            return arrays[name]
        case {"$tuple": list(entries), **rest} if not rest:
            return tuple(_tree(entry, arrays) for entry in entries)
        case {"$pairs": list(pairs), **rest} if not rest:
            return {key: _tree(entry, arrays) for key, entry in pairs}
        case dict():
            return {key: _tree(entry, arrays) for key, entry in plain.items()}
        case list():
            return [_tree(entry, arrays) for entry in plain]
        case _:
            return plain
