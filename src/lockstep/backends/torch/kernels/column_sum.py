"""During a run on a GPU, sums over rows are computed by our kernels: the gradients of biases, which are many.

PyTorch's own take three times as long for the few rows of a shard.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

TYPES = torch.bfloat16, torch.float16, torch.float32
MIN_ROWS, MIN_COLUMNS = 256, 16  # fewer are not worth two launches


def our_sum(
    tensor: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """`aten::sum` as PyTorch declares it; over all dimensions but the one that is last in memory, ours."""
    kept = _kept_dimension(tensor, dim) if dtype in (None, tensor.dtype) else None
    if kept is None:
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        out = tensor.new_empty(0, dtype=dtype or (torch.int64 if is_whole else tensor.dtype))
        found: Tensor = torch.ops.aten.sum.IntList_out(tensor, dim, keepdim, dtype=dtype, out=out)
        return found
    from lockstep.backends.torch.kernels.column_sum_triton import column_sums

    (total,) = column_sums(tensor, tensor.shape[kept])
    return total.view([size if at == kept else 1 for at, size in enumerate(tensor.shape)]) if keepdim else total


def _kept_dimension(tensor: Tensor, dim: Sequence[int] | None) -> int | None:
    """The dimension that is left, where our kernels fit: by type, shape and order in memory alone."""
    if dim is None or tensor.dtype not in TYPES or tensor.ndim < 2:
        return None
    left = set(range(tensor.ndim)) - {each % tensor.ndim for each in dim}
    if left == {tensor.ndim - 1} and tensor.is_contiguous():
        kept = tensor.ndim - 1
    elif left == {1} and tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        kept = 1
    else:
        return None
    num_columns = tensor.shape[kept]
    is_large = num_columns >= MIN_COLUMNS and tensor.numel() >= MIN_ROWS * num_columns
    return kept if is_large else None
