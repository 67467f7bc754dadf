"""Products of large float32 matrices by oneDNN, on processors of AMD's with AVX-512.

PyTorch asks MKL, which takes its AVX2 kernels on processors that are not Intel's: 111 GFLOP/s on a core of an EPYC,
where oneDNN has 250. A step of a small transformer takes 0.72 of the time.
"""

from functools import cache

import torch
from torch import Tensor

from lockstep.backends.hardware import cpu_vendor

MIN_WORK = 1 << 22  # multiplications, 75 microseconds of MKL's: a function in Python takes 8


@cache
def multiplies_with_onednn() -> bool:
    """Whether that is so here: by the processor, and by the widest vectors that PyTorch may use (`--portable`)."""
    return (
        cpu_vendor() == "AuthenticAMD"
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def our_mm(left: Tensor, right: Tensor) -> Tensor:
    """`aten::mm` as PyTorch declares it."""
    if _fits(left, right):
        return product(left, right)
    found: Tensor = torch.ops.aten.mm.out(left, right, out=left.new_empty(0))
    return found


def our_addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`aten::addmm` as PyTorch declares it."""
    is_layer = beta == alpha == 1 and bias.shape == right.shape[1:] and bias.dtype == left.dtype
    if is_layer and _fits(left, right):
        return product(left, right, bias.contiguous())
    found: Tensor = torch.ops.aten.addmm.out(bias, left, right, beta=beta, alpha=alpha, out=left.new_empty(0))
    return found


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """That of two matrices, whose rows or columns are contiguous, by oneDNN."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return found


def _fits(left: Tensor, right: Tensor) -> bool:
    """By types, shapes and strides alone, which are the same for a shard on any device."""
    return (
        left.dtype == right.dtype == torch.float32
        and left.ndim == right.ndim == 2
        and left.shape[1] == right.shape[0]
        and len(left) * right.numel() >= MIN_WORK
        and all(1 in each.stride() for each in (left, right))
    )
