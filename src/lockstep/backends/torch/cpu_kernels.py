"""During a run of modules on CPUs, some of PyTorch's functions and operations are faster ones, by rules of shapes.

What is replaced costs some Python for every call, so LeNet, whose layers are small, does not ask for it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from lockstep.backends.torch.convolution_cpu import our_conv2d
from lockstep.backends.torch.matrix_products import multiplies_with_onednn, our_addmm, our_mm
from lockstep.backends.torch.replacing import Replacement, functions_replaced, operations_replaced

FUNCTIONS = (Replacement("conv2d", (torch, F), our_conv2d),)
OPERATIONS: dict[str, Callable[..., Any]] = {"mm": our_mm, "addmm": our_addmm}


class CpuKernels:
    """Those of a session, from the moment on when they are asked for."""

    def __init__(self) -> None:
        self._lock, self._undo = threading.Lock(), ExitStack()
        self._is_open = self._are_used = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """At its end, PyTorch's own are back."""
        with ExitStack() as self._undo:
            self._is_open, self._are_used = True, False
            try:
                yield
            finally:
                self._is_open = False

    def use(self) -> None:
        """Until the session ends, they are used where they were measured."""
        with self._lock:  # all ranks ask for them
            if self._is_open and not self._are_used and multiplies_with_onednn():
                self._undo.enter_context(functions_replaced(FUNCTIONS))
                self._undo.enter_context(operations_replaced(OPERATIONS, "CPU"))
                self._are_used = True


CPU_KERNELS = CpuKernels()
