"""Products of large float32 matrices by oneDNN, on processors of AMD's with AVX-512.

PyTorch asks MKL, which takes its AVX2 kernels on processors that are not Intel's: 111 GFLOP/s on a core of an EPYC,
where oneDNN has 250.
"""

from functools import cache

import torch
from torch import Tensor

from lockstep.backends.hardware import cpu_vendor

MIN_WORK = 1 << 22  # multiplications, 75 microseconds of MKL's: functions in Python take some themselves


@cache
def multiplies_with_onednn() -> bool:
    """Whether that is so here: by the processor, and by the widest vectors that PyTorch may use (`--portable`)."""
    return (
        cpu_vendor() == "AuthenticAMD"
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_plain_call() -> bool:
    """Whether a function is called as it stands, and neither compiled, traced nor transformed (`torch.func`)."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """That of two matrices, whose rows or columns are contiguous."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return found
