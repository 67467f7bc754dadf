"""Operations of PyTorch's that are ours for a while: in its dispatcher, where compiled code finds them, too."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def operations_replaced(operations: dict[str, Callable[..., Any]], kind: str) -> Iterator[None]:
    """While it is entered, these operations, by their names in `aten`, are ours on devices of a kind: CPU or CUDA.

    A replacement is given what PyTorch declares, below autograd. It reaches PyTorch's own by another overload.
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
