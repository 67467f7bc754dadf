"""PyTorch's settings while a run lasts: deterministic kernels, no autotuning, one intra-op thread; put back afterwards."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lockstep.backends.malloc import freed_memory_kept
from lockstep.backends.process_settings import one_at_a_time
from lockstep.core.device import Device

_LOCK = threading.Lock()


@contextmanager
def deterministic_session(devices: list[Device]) -> Iterator[None]:
    """While it lasts, kernels are deterministic; afterwards every setting is as it was."""
    with ExitStack() as undo:
        undo.enter_context(one_at_a_time(_LOCK, "PyTorch"))
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(torch.set_rng_state, torch.get_rng_state())  # the caller's own random numbers
        undo.callback(random.setstate, random.getstate())  # PyTorch draws from them when it loads parts of itself
        one_intra_op_thread()  # the calling thread too: what it sets, matrix products of all threads go by
        undo.enter_context(freed_memory_kept())
        if torch.cuda.is_initialized():
            undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        undo.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        # a debugging aid of that mode, which costs a pass over every new tensor
        _set(undo, torch.utils.deterministic, "fill_uninitialized_memory", False)
        _set(undo, torch.backends.cudnn, "deterministic", True)
        _set(undo, torch.backends.cudnn, "benchmark", False)
        # the fused kernels for attention draw dropout from a counter of their own, or add in arrival order
        for kernel in ("flash", "mem_efficient", "cudnn"):
            enabled = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()
            undo.callback(getattr(torch.backends.cuda, f"enable_{kernel}_sdp"), enabled)
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
        for operation in _with_precision():
            _set(undo, operation, "fp32_precision", "ieee")  # float32 means float32
        for number in {device.number for device in devices if device.kind == "cuda"}:
            # cuBLAS reads this when it starts. Without it, deterministic mode refuses every matrix product, and
            # nobody but the process itself can set it for a notebook; a value already there stays.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.cuda.synchronize(number)  # what the caller gave us may still be computed on another stream
        yield


def one_intra_op_thread() -> None:
    """The calling thread computes alone from now on, whatever others set for themselves."""
    torch.get_num_threads()  # a thread takes over the number that was set last when it is first asked: now, not later
    torch.set_num_threads(1)


def start_thread(device: torch.device, stream: torch.cuda.Stream | None) -> None:
    """Makes the calling thread one that works for a device."""
    one_intra_op_thread()  # the session puts the process-wide default back
    if stream is not None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream)


def use_tf32() -> None:
    """Products of float32 numbers on a GPU are rounded to TensorFloat-32 from now on, until the session ends."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "tf32"


def _set(undo: ExitStack, owner: Any, name: str, value: object) -> None:
    """Sets `owner.name` until `undo` closes."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _with_precision() -> tuple[Any, ...]:
    """The operations whose precision for float32 can be set."""
    return (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,
        torch.backends.mkldnn.conv,
    )
