"""During a run on a GPU, some of PyTorch's functions and operations are ours.

Each takes what our kernels fit, by types, shapes and order in memory alone, and leaves the rest to PyTorch's own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from lockstep.backends.torch.kernels.attention import our_attention, our_attention_backward
from lockstep.backends.torch.kernels.batch_norm import our_batch_norm
from lockstep.backends.torch.kernels.column_sum import our_sum
from lockstep.backends.torch.kernels.convolution import our_conv2d
from lockstep.backends.torch.kernels.hopper import can_replace, on_its_gpu
from lockstep.backends.torch.kernels.layer_norm import our_layer_norm
from lockstep.backends.torch.replacing import Replacement, functions_replaced, operations_replaced

FUNCTIONS = (
    Replacement("conv2d", (torch, F), our_conv2d),
    Replacement("batch_norm", (torch,), our_batch_norm),
    Replacement("layer_norm", (torch,), our_layer_norm),
)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": our_attention,
    "_scaled_dot_product_flash_attention_backward": our_attention_backward,
    "sum.dim_IntList": our_sum,
}


@contextmanager
def our_kernels() -> Iterator[None]:
    """While it is entered, PyTorch's functions and operations take our kernels, where these run."""
    if not can_replace():
        yield
        return
    guarded = {name: on_its_gpu(operation) for name, operation in OPERATIONS.items()}
    with functions_replaced(FUNCTIONS), operations_replaced(guarded, "CUDA"):
        yield
