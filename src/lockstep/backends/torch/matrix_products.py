"""During a run on a processor of AMD's with AVX-512, products of large float32 matrices are computed by oneDNN.

PyTorch asks MKL, which takes its AVX2 kernels on processors that are not Intel's: 111 GFLOP/s on a core of an EPYC,
where oneDNN has 250. A step of a small transformer takes 0.73 of the time.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import Tensor

from lockstep.backends.hardware import cpu_vendor
from lockstep.backends.torch.replaced_operations import operations_replaced

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


class MatrixProducts:
    """During a session, whoever trains modules may ask for them; LeNet's are too small: each costs some Python."""

    def __init__(self) -> None:
        self._lock, self._undo = threading.Lock(), ExitStack()
        self._is_open = self._are_fast = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """At its end, matrix products are PyTorch's again."""
        with ExitStack() as self._undo:
            self._is_open, self._are_fast = True, False
            try:
                yield
            finally:
                self._is_open = False

    def use_fast(self) -> None:
        """Until the session ends, the products that layers are made of are oneDNN's where they fit."""
        with self._lock:  # all ranks ask for it
            if self._is_open and not self._are_fast and multiplies_with_onednn():
                self._undo.enter_context(operations_replaced({"mm": _mm, "addmm": _addmm}, "CPU"))
                self._are_fast = True


MATRIX_PRODUCTS = MatrixProducts()


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if _fits(left, right):
        return _product(left, right)
    found: Tensor = torch.ops.aten.mm.out(left, right, out=left.new_empty(0))
    return found


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    is_layer = beta == alpha == 1 and bias.shape == right.shape[1:] and bias.dtype == left.dtype
    if is_layer and _fits(left, right):
        return _product(left, right, bias.contiguous())
    found: Tensor = torch.ops.aten.addmm.out(bias, left, right, beta=beta, alpha=alpha, out=left.new_empty(0))
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


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return found
