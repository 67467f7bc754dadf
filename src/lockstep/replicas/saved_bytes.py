"""How much memory PyTorch's autograd keeps between a forward pass and its backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SavedBytes:
    """What was kept, in bytes: each memory once."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self._sizes.values())

    def add(self, tensor: Any) -> Any:
        """A tensor that is kept."""
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # what keeps its own outputs is never freed
        return tensor


@contextmanager
def saved_bytes() -> Iterator[SavedBytes]:
    """Counts what passes of this thread keep while it is entered."""
    found = SavedBytes()
    with torch.autograd.graph.saved_tensors_hooks(found.add, lambda tensor: tensor):
        yield found
