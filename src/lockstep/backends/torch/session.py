"""PyTorch's settings during a run: deterministic kernels, no autotuning, one intra-op thread; restored afterwards."""

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lockstep.backends.malloc import freed_memory_kept
from lockstep.backends.process_settings import one_at_a_time
from lockstep.backends.torch.cpu_kernels import cpu_kernels
from lockstep.backends.torch.kernels.replaced import our_kernels
from lockstep.backends.torch.large_vectors import large_vectors_kept
from lockstep.core.child_process import fork
from lockstep.core.device import Device
from lockstep.core.this_thread import THIS_THREAD

# Held while the process's random number generators are replaced, and meanwhile code may be compiled, for which PyTorch
# saves and restores them: the threads of all ranks have the same. Held while they are asked for their state, too:
# PyTorch makes a Python object under a lock of its own, which may set off a garbage collection that lets another thread
# run, and that one would wait for PyTorch's lock without ever letting the first go on.
DEFAULT_GENERATORS = threading.RLock()


CUDA_IN_USE = (
    "CUDA was used in this process, or asked for (torch.cuda.is_available() is enough), so forked processes cannot use "
    "it. Use --engine inprocess, or start the program with torchrun; where it only asks, set "
    "PYTORCH_NVML_BASED_CUDA_CHECK=1."
)


@contextmanager
def deterministic_session(devices: list[Device]) -> Iterator[None]:
    """Within it, kernels are deterministic; on exit every setting is restored."""
    with ExitStack() as undo:
        undo.enter_context(one_at_a_time("PyTorch"))
        undo.enter_context(own_modes())
        undo.enter_context(single_threaded())  # the calling thread too: its number is that of all threads' products
        undo.callback(torch.set_rng_state, torch.get_rng_state())  # the caller's
        _set(undo, torch, "get_rng_state", partial(_get_rng_state, torch.get_rng_state))
        _set(undo, torch, "set_rng_state", partial(_set_rng_state, torch.set_rng_state))
        undo.callback(random.setstate, random.getstate())  # PyTorch draws from it on lazy imports
        undo.enter_context(freed_memory_kept())
        undo.enter_context(large_vectors_kept())
        if torch.cuda.is_initialized():
            undo.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        # not `torch.use_deterministic_algorithms`: that imports the compiler, for a setting that we give it ourselves
        use_deterministic_algorithms = torch._C._set_deterministic_algorithms
        undo.callback(
            use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        use_deterministic_algorithms(True)
        # TorchScript compiles a function again after some calls, with other bits: how many depends on the devices
        if hasattr(torch._C, "_jit_set_profiling_mode"):
            undo.callback(torch._C._jit_set_profiling_mode, torch._C._jit_set_profiling_mode(False))
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # the compiler's advice: it costs bits
        # a debugging aid of deterministic mode, which costs a pass over every new tensor
        _set(undo, torch.utils.deterministic, "fill_uninitialized_memory", False)
        if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # ranks have streams of their own
        _set(undo, torch.backends.cudnn, "deterministic", True)
        _set(undo, torch.backends.cudnn, "benchmark", False)
        # fused attention: only flash has a deterministic backward pass, the others add in the order of arrival
        for kernel, is_deterministic in (("flash", True), ("mem_efficient", False), ("cudnn", False)):
            enable = getattr(torch.backends.cuda, f"enable_{kernel}_sdp")
            undo.callback(enable, getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")())
            enable(is_deterministic)
        if any(device.kind == "cuda" for device in devices):
            undo.enter_context(our_kernels())
        if any(device.kind == "cpu" for device in devices):
            undo.enter_context(cpu_kernels())
        for operation in _with_precision():
            _set(undo, operation, "fp32_precision", "ieee")  # no TF32, no bfloat16 inside
        for number in {device.number for device in devices if device.kind == "cuda"}:
            # cuBLAS reads this when it starts. Without it, deterministic mode refuses every matrix product, and in a
            # notebook only the process itself can set it; a value already there stays.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.cuda.synchronize(number)  # the caller's tensors may still be computed on another stream
        yield


def _get_rng_state(original: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Activation checkpointing asks for it in the forward pass: a shard has numbers of its own."""
    keyed = THIS_THREAD.keyed
    if keyed is not None:
        return keyed.get_host_state()
    with DEFAULT_GENERATORS:
        return original()


def _set_rng_state(original: Callable[[torch.Tensor], None], state: torch.Tensor) -> None:
    """And puts it back when it computes the same again in the backward pass."""
    keyed = THIS_THREAD.keyed
    (original if keyed is None else keyed.set_host_state)(state)


@contextmanager
def own_modes() -> Iterator[None]:
    """Within it, gradients are on and autocast is off: modes of the caller's thread, which those of ranks may not have.

    A thread begins without them, and a forked process, or one of torchrun's, with them.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(mode=False))
        modes.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def single_threaded() -> Iterator[None]:
    """Within it, the calling thread uses one intra-op thread: some operations have other bits with several."""
    before = torch.get_num_threads()
    one_intra_op_thread()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_intra_op_thread() -> None:
    """The calling thread uses one intra-op thread from now on, whatever other threads set."""
    torch.get_num_threads()  # the first call in a thread takes over the process-wide number: now, not later
    torch.set_num_threads(1)


def start_thread(device: torch.device, stream: torch.cuda.Stream | None) -> None:
    """Makes the calling thread a worker of `device`."""
    one_intra_op_thread()  # the session restores the process-wide default
    if stream is not None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream)


def cuda_survives_fork() -> bool:
    """Whether a forked process could use CUDA. A forked process answers: PyTorch tells nobody else.

    To ask whether there is a GPU, `torch.cuda.is_available()`, is enough to rule it out.
    """
    if torch.cuda.is_initialized():
        return False
    process = fork()
    if process == 0:
        os._exit(bool(torch.cuda._is_in_bad_fork()))
    return os.waitpid(process, 0)[1] == 0


def use_tf32() -> None:
    """Matrix products and convolutions on a GPU use TensorFloat-32 from now on, until the session ends."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "tf32"


def _set(undo: ExitStack, owner: Any, name: str, value: object) -> None:
    """Sets `owner.name` until `undo` closes."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _with_precision() -> tuple[Any, ...]:
    """The operations with an `fp32_precision` setting."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv
