"""During a run on CPUs, layers take functions of ours where these were measured to be faster."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

from lockstep.backends.torch.convolution_cpu import our_conv2d
from lockstep.backends.torch.linear_cpu import our_linear
from lockstep.backends.torch.matrix_products import multiplies_with_onednn
from lockstep.backends.torch.replacing import Replacement, functions_replaced

FUNCTIONS = (
    Replacement("linear", (F, torch._C._nn), our_linear),  # stages that were traced call the second
    Replacement("conv2d", (torch, F), our_conv2d),
)


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """While it is entered, PyTorch's functions are ours on processors on which that pays."""
    if not multiplies_with_onednn():
        yield
        return
    with functions_replaced(FUNCTIONS):
        yield
