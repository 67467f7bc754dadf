"""CUDA kernels that PyTorch has no operation for, compiled at their first use by the compiler that PyTorch carries."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

NUM_THREADS = 256
WIDTH = 4  # entries of a thread
_THREAD = threading.local()

_CTYPES = {torch.float32: "float", torch.bfloat16: "unsigned short"}

_ADD = """
__device__ float number(float x) { return x; }
__device__ float number(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }  // of bfloat16

template <typename T> struct alignas(4 * sizeof(T)) Four { T x[4]; };

extern "C" __global__ void added(float* out, int size%(parameters)s) {
    long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (at + 4 <= size) {
        %(loads)s
        Four<float> total;
        #pragma unroll
        for (int i = 0; i < 4; i++) total.x[i] = %(wide)s;
        *(Four<float>*)(out + at) = total;
    } else {
        for (; at < size; at++) out[at] = %(narrow)s;
    }
}
"""


@cache
def can_compile_kernels() -> bool:
    """Whether there is a GPU, and this PyTorch compiles kernels for it."""
    if not torch.cuda.is_available():
        return False
    try:
        compile_kernel('extern "C" __global__ void nothing() {}', "nothing", current_gpu())
    except Exception as problem:  # of a private function that may change: then PyTorch's own operations do
        raise_if_out_of_memory(problem)
        return False
    return True


def raise_if_out_of_memory(problem: Exception) -> None:
    """That passes, and says nothing about a kernel: other ranks would use it, with other bits."""
    if "out of memory" in str(problem).lower().replace("_", " "):  # NVRTC_ERROR_OUT_OF_MEMORY, too
        raise problem


def current_gpu() -> torch.device:
    """The GPU on which this thread launches kernels."""
    return torch.device("cuda", torch.cuda.current_device())


def compile_kernel(source: str, name: str, device: torch.device) -> Any:
    """A function `name` of CUDA source code, for a GPU."""
    with _context_of(device):
        return torch.cuda._compile_kernel(source, name)


def launch(
    kernel: Any,
    num_blocks: int | tuple[int, int, int],
    arguments: list[Any],
    num_threads: int = NUM_THREADS,
    num_shared_bytes: int = 0,
) -> None:
    """Starts a kernel on the current stream of the GPU that the first argument, a tensor, is on."""
    grid = (num_blocks, 1, 1) if isinstance(num_blocks, int) else num_blocks
    with _context_of(arguments[0].device):
        kernel(grid=grid, block=(num_threads, 1, 1), args=arguments, shared_mem=num_shared_bytes)


@contextmanager
def _context_of(device: torch.device) -> Iterator[None]:
    """Within it, the GPU is the thread's current one, as it is for PyTorch's own operations.

    PyTorch's first operation in a thread makes the thread's CUDA context; a kernel of ours may come before it.
    """
    with torch.cuda.device(device):
        known = _THREAD.__dict__.setdefault("devices", set())
        if device not in known:
            torch.zeros(1, device=device)
            known.add(device)
        yield


def add_gradients(brackets: str, out: Tensor, addends: Sequence[tuple[Tensor, ...]]) -> None:
    """Fills a float32 vector on a GPU with the sum x0 + x1 + ... in these brackets.

    An addend is the sum of its parts; without any it is zero. Parts are contiguous, of float32 or bfloat16: each is
    read once, and nothing else is written.
    """
    kinds = tuple(tuple(_CTYPES[part.dtype] for part in parts) for parts in addends)
    kernel = _add_kernel(brackets, kinds, out.device)
    num_blocks = -(-out.numel() // (NUM_THREADS * WIDTH))
    if num_blocks:
        arguments = [out, out.numel(), *(part for parts in addends for part in parts)]
        launch(kernel, num_blocks, arguments)


@cache
def _add_kernel(brackets: str, kinds: tuple[tuple[str, ...], ...], device: torch.device) -> Any:
    given = [(f"p{number}_{at}", kind) for number, parts in enumerate(kinds) for at, kind in enumerate(parts)]

    def sum_of(entry: str) -> str:
        """The sum of one entry of all addends, in C."""
        found = brackets
        for number in reversed(range(len(kinds))):  # x10 before x1
            parts = [f"number(p{number}_{at}{entry})" for at in range(len(kinds[number]))]
            found = found.replace(f"x{number}", f"({' + '.join(parts) or '0.0f'})")
        return found

    source = _ADD % {
        "parameters": "".join(f", const {kind}* {name}" for name, kind in given),
        "loads": "\n        ".join(
            f"Four<{kind}> {name}_ = *(const Four<{kind}>*)({name} + at);" for name, kind in given
        ),
        "wide": sum_of("_.x[i]"),
        "narrow": sum_of("[at]"),
    }
    return compile_kernel(source, "added", device)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a vector can be read four entries at a time."""
    return tensor.data_ptr() % (WIDTH * tensor.element_size()) == 0
