"""LeNet on GPUs: convolution + ReLU + average pool as kernels of ours, compiled for the shapes at hand in a second.

PyTorch has a kernel for each of the three, and for each of their gradients, and cuDNN's are made for larger images.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.backends.torch.kernels.lenet_gpu_source import KERNELS, SHAPES
from lockstep.backends.torch.kernels.nvrtc import NUM_THREADS, can_compile_kernels, compile_kernel, launch

POOL = 2
MAX_SHARED = 48 * 1024  # bytes of a block
MAX_THREADS = 512  # more would leave too few registers to each
NUM_CHUNKS = 32  # of the images of a shard


class Division(NamedTuple):
    """How the work of a kernel is divided: threads of a block (0: it cannot be), and constants in its source."""

    num_threads: int
    constants: dict[str, int]


class Shapes(NamedTuple):
    """The shapes of a layer: channels, height and width of an input, output channels, height and width of a kernel."""

    C: int
    H: int
    W: int
    O: int  # noqa: E741
    K: int

    @property
    def pooled(self) -> tuple[int, int]:
        """Height and width of a pooled image."""
        return (self.H - self.K + 1) // POOL, (self.W - self.K + 1) // POOL

    @property
    def num_tiles(self) -> int:
        """Of 2 x 2 pixels, that cover the part of an input channel that is used."""
        height, width = self.pooled
        return ((2 * height + self.K) // 2) * ((2 * width + self.K) // 2)

    def num_arranged(self) -> tuple[int, int]:
        """Entries of the weights for the forward and for the backward pass."""
        found = self.division("arranged").constants
        outputs, channels = -(-self.O // found["OT"]) * found["OT"], -(-self.C // found["CT"]) * found["CT"]
        return self.C * self.K * self.K * outputs, self.O * self.K * self.K * channels

    @cache  # noqa: B019 (there are few)
    def division(self, kernel: str) -> Division:
        """How the work is divided: by shapes alone, so that it is the same on every device."""
        height, width = self.pooled
        padded = 4 * (2 * height + 2 * self.K) * (2 * width + 2 * self.K)
        image = 4 * self.C * self.H * (self.W + 1) + 8
        channels, outputs = _channels(self.C, self.num_tiles), _channels(self.O, height * width)
        if kernel == "pooled":
            return self._in_groups(outputs, self.O, height * width, self.C, image, 0)
        if kernel == "input_gradient":
            return self._in_groups(channels, self.C, self.num_tiles, self.O, 8, padded)
        if kernel == "weight_gradients":
            rows = height if self.C * self.O < MAX_THREADS // 4 else 1
            each = _divisor(self.O, 2, lambda each: self.C * (self.O // each) * rows <= MAX_THREADS)
            in_rows = 4 * rows * self.O * (self.C * self.K * self.K + 1) if rows > 1 else 0
            has_room = image + 5 * self.O * height * width + in_rows <= MAX_SHARED
            num_threads = self.C * (self.O // each) * rows if each and has_room else 0
            return Division(num_threads, {"OW": each, "ROWS": rows})
        return Division(NUM_THREADS, {"OT": outputs, "CT": channels})

    def _in_groups(self, each: int, channels: int, places: int, summed: int, fixed: int, of_summed: int) -> Division:
        """How a convolution is divided: `each` of the output `channels` for a thread, and channels that are `summed`.

        In shared memory there are `fixed` bytes, `of_summed` for each channel that is summed, and its weights.
        """
        if not each:
            return Division(0, {})
        groups_of = -(-channels // each)
        weights = 4 * self.K * self.K * groups_of * each

        def has_room(num: int) -> bool:
            return fixed + num * (of_summed + weights) + 8 <= MAX_SHARED

        staged = _divisor(summed, 10, lambda num: has_room(num) and num % 2 == 0) or _divisor(summed, 10, has_room)
        size = places * groups_of
        can_halve = 2 * size <= MAX_THREADS and staged % 2 == 0 and 16 * each * size <= staged * weights
        groups = 2 if can_halve else 1
        name = "OT" if not of_summed else "CT"
        return Division(size * groups if staged else 0, {name: each, "STAGED": staged, "GROUPS": groups})


def _channels(number: int, num_threads: int) -> int:
    """How many channels a thread computes, four at a time, where a channel takes so many threads."""
    return next((each for each in (4, 8, 12) if num_threads * -(-number // each) <= MAX_THREADS), 0)


def _divisor(number: int, most: int, fits: Any) -> int:
    """The largest divisor of a number up to `most` that fits; 0 if none does."""
    return max((each for each in range(1, most + 1) if number % each == 0 and fits(each)), default=0)


def has_kernels(X: Tensor, weight: Tensor, size: int) -> bool:
    """Whether a layer is computed by our kernels: by its shapes and types, which are the same on every device."""
    if size != POOL or X.dtype != torch.float32 or weight.dtype != torch.float32 or not can_compile_kernels():
        return False
    return _fits(_shapes(X, weight)) if X.ndim == 4 and weight.shape[2] == weight.shape[3] else False


def _fits(shapes: Shapes) -> bool:
    return min(shapes.pooled) > 0 and shapes.K <= 5 and all(shapes.division(name).num_threads for name in KERNELS)


def _shapes(X: Tensor, weight: Tensor) -> Shapes:
    channels, height, width = X.shape[1:]
    return Shapes(channels, height, width, weight.shape[0], weight.shape[2])


def source_of(name: str, shapes: Shapes) -> str:
    """A kernel for these shapes, in CUDA C++."""
    constants = shapes._asdict() | shapes.division("arranged").constants | shapes.division(name).constants
    return "".join(f"#define {key} {value}\n" for key, value in constants.items()) + SHAPES + KERNELS[name]


@cache
def _kernel(name: str, shapes: Shapes, device: torch.device) -> Any:
    return compile_kernel(source_of(name, shapes), name, device)


def _run(name: str, shapes: Shapes, num_blocks: int, arguments: list[Any]) -> None:
    kernel = _kernel(name, shapes, arguments[0].device)
    launch(kernel, num_blocks, arguments, shapes.division(name).num_threads)


class ConvReluPool2dOnGPU(torch.autograd.Function):
    """Images, weight and bias -> images pooled by 2 x 2."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        X, weight, bias = X.contiguous(), weight.contiguous(), bias.contiguous()
        shapes = _shapes(X, weight)
        there, back = (X.new_empty(size) for size in shapes.num_arranged())
        _run("arranged", shapes, -(-max(len(there), len(back)) // NUM_THREADS), [there, back, weight])
        out = X.new_empty([len(X), shapes.O, *shapes.pooled])
        signs = torch.empty_like(out, dtype=torch.uint8)
        _run("pooled", shapes, len(X), [out, signs, X, there, bias])
        ctx.save_for_backward(X, back, signs)
        ctx.shapes = shapes
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        X, arranged, signs = ctx.saved_tensors
        shapes, grad, num_images, of_X = ctx.shapes, grad.contiguous(), len(X), None
        if ctx.needs_input_grad[0]:
            of_X = torch.empty_like(X)
            _run("input_gradient", shapes, num_images, [of_X, grad, signs, arranged])
        per_block = -(-num_images // NUM_CHUNKS)
        weights = shapes.O, shapes.C, shapes.K, shapes.K
        num_blocks, size = -(-num_images // per_block), math.prod(weights)
        chunks = X.new_empty([num_blocks, size + shapes.O])
        _run("weight_gradients", shapes, num_blocks, [chunks, X, grad, signs, num_images, per_block])
        total = X.new_empty(size + shapes.O)
        _run("added", shapes, -(-len(total) // NUM_THREADS), [total, chunks, num_blocks])
        return of_X, total[:size].view(weights), total[size:]
