"""Functions and operations of PyTorch's that are ours for a while, so that models need not change."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch


class Replacement(NamedTuple):
    """A function of PyTorch's: its name, where layers find it, and what makes ours of it."""

    name: str
    modules: tuple[ModuleType, ...]
    made_of: Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def functions_replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """While it is entered, these functions are ours where layers find them."""
    with ExitStack() as undo:
        for name, modules, made_of in replacements:
            made: dict[Any, Any] = {}  # one for all modules, unless somebody else has replaced it in one of them
            for module in modules:
                original = getattr(module, name)
                undo.callback(setattr, module, name, original)
                setattr(module, name, made.setdefault(original, made_of(original)))
        yield


@contextmanager
def operations_replaced(operations: dict[str, Callable[..., Any]], kind: str) -> Iterator[None]:
    """While it is entered, these operations, by their names in `aten`, are ours on devices of a kind: CPU or CUDA.

    They are replaced in PyTorch's dispatcher, where compiled code finds them, too. Ours is given what PyTorch declares,
    below autograd, and reaches PyTorch's own by another overload.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for name, operation in operations.items():
                library.impl(name, operation, kind)
        yield
    finally:
        library._destroy()
