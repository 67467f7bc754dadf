"""Whether plain values, from a file that anybody could have written, are of the types that they should have."""

import math
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

MAX_COUNT = 10**15  # larger integers are no counts or bytes, and what draws or formats them may fail
MAX_NUMBER = 1e39  # a loss, or a learning rate, may be any number of float32


def fits(value: Any, kind: Any) -> bool:
    """Whether a value that was read as JSON is one of `kind`: a type, a union, list[...] or dict[str, ...].

    >>> fits([1, 2], list[int]), fits({"a": None}, dict[str, float | None]), fits(10**40, float), fits(True, int)
    (True, True, False, False)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
    if kind in (None, NoneType):
        return value is None
    if kind in (int, float):
        types = int if kind is int else (int, float)
        return isinstance(value, types) and not isinstance(value, bool) and is_small(value)
    return kind is Any or isinstance(value, kind)


def is_small(value: float) -> bool:
    """Whether a number is finite, and of a size that is met with."""
    return abs(value) <= MAX_COUNT if isinstance(value, int) else math.isfinite(value) and abs(value) <= MAX_NUMBER


def fitting(values: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """Without those that are not of their kind; what has no kind stays."""
    return {name: value for name, value in values.items() if name not in kinds or fits(value, kinds[name])}
