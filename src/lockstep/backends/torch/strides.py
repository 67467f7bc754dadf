"""Tensors with gaps in memory, and expanded ones, copied with their strides: with others, bits may be others, too."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_with_strides(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, without its graph."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or is_dense(tensor):
        return tensor.to(device, copy=True)
    return with_strides(dense(tensor).to(device), tensor.shape, tensor.stride())


def is_dense(tensor: Tensor) -> bool:
    """Whether its entries lie in memory without gaps, each once, in whatever order: then a clone has its strides.

    >>> is_dense(torch.zeros(3, 4).T), is_dense(torch.zeros(3, 4)[:, ::2]), is_dense(torch.zeros(3, 1).expand(3, 4))
    (True, False, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def dense(tensor: Tensor) -> Tensor:
    """Its entries as a vector, those of expanded dimensions once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.contiguous().view(-1)


def with_strides(entries: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A new tensor of these entries, and no view of another: it may be written to in place."""
    once = [size if stride else 1 for size, stride in zip(shape, strides, strict=True)]
    found = torch.empty_strided(shape, strides, dtype=entries.dtype, device=entries.device)
    found.as_strided(once, strides).copy_(entries.view(once))
    return found
