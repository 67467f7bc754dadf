"""What an object keeps, to find out what a computation has changed: numbers, tensors, generators, at any depth."""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.layout import sha256_of
from lockstep.replicas.module_state import to_numpy

MAX_DEPTH, MAX_VALUES = 8, 20_000
OURS = "lockstep.training."  # like another trainer, whose module a loss uses
PLAIN = (int, float, complex, str, bytes, bool, type(None))
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes


def state_of(owner: Any, is_model: bool = True) -> dict[str, str]:
    """A text for each value that `owner` keeps, by its path. Without a model's buffers: shards find them equal."""
    found: dict[str, str] = {}
    for path, text in _walk(owner, "", 0, set(), is_model):
        found[path] = text
        if len(found) >= MAX_VALUES:
            break
    return found


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The paths of what was changed, added or removed."""
    return [path for path in {**before, **after} if before.get(path) != after.get(path)]


def counters_of(owner: Any, is_model: bool = True) -> dict[str, str]:
    """The same for integers only, which costs little: they count something, and may have an effect later."""
    found = islice(_walk(owner, "", 0, set(), is_model, with_tensors=False), MAX_VALUES)
    return {path: text for path, text in found if text.lstrip("-").isdigit()}


def counted(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The paths of integers that were there before, and are others now."""
    return [path for path in before if path in after and before[path] != after[path]]


def _walk(
    value: Any, path: str, depth: int, seen: set[int], is_model: bool, *, with_tensors: bool = True
) -> Iterator[tuple[str, str]]:
    if isinstance(value, PLAIN):
        yield path, repr(value)[:200]
    elif isinstance(value, (Tensor, np.ndarray)) and not with_tensors:
        return
    elif (text := _text(value)) is not None:
        yield path, text
    elif depth < MAX_DEPTH and id(value) not in seen and not type(value).__module__.startswith(OURS):
        seen.add(id(value))
        for name, part in _parts(value, is_model):
            below = f"{path}.{name}" if path else name
            yield from _walk(part, below, depth + 1, seen, is_model, with_tensors=with_tensors)


def _text(value: Any) -> str | None:
    """The value of a tensor or a generator."""
    if isinstance(value, Tensor):
        return "a tensor" if value.is_meta else sha256_of([to_numpy(value)])
    if isinstance(value, np.ndarray):
        return sha256_of([value]) if value.dtype != object else str(len(value))
    if isinstance(value, torch.Generator):
        return sha256_of([value.get_state().numpy()])
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.get_state()) if isinstance(value, np.random.RandomState) else None


def _parts(value: Any, is_model: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from ((name, part) for name, part in vars(value).items() if name not in OF_EVERY_MODULE)
        yield from value._parameters.items()
        if not is_model:
            yield from value._buffers.items()
        yield from value._modules.items()
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((str(number), part) for number, part in enumerate(list(value)))
    elif hasattr(value, "__closure__"):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not set yet
                continue
        yield from vars(value).items()
    elif hasattr(value, "__self__") and not isinstance(value.__self__, type(np)):  # a method
        yield "self", value.__self__
    elif hasattr(value, "__dict__") and not isinstance(value, (type, type(np))):
        yield from list(vars(value).items())
