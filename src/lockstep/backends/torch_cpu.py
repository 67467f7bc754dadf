"""A convolution, ReLU and average pooling on one CPU core, arranged for its cache and its vector units.

- Images lie channels-last (all channels of a pixel together), from the first convolution on.
- Images of one channel are too few numbers for a convolution's kernels: a matrix product does them, biases included.
  Its rows are the first window of every pool, then the second of every pool, and so on: to pool is to add long rows.
- The gradient of a convolution's input is computed for a number of channels that fills vectors of 16: a third faster
  than for 20 channels, four of which would be left over.
- ReLU overwrites what the convolution gave, and the three are one step of the backward pass.
- Memory that a shard frees is kept for the next one. To give it back and get it again is a page fault for every 4 kB.

Which way is taken depends on shapes alone, never on a stopwatch: two runs must take the same.
"""

import contextlib
import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LANES = 16  # float32 numbers in the widest vectors
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt
MB = 1 << 20


@cache
def keep_freed_memory() -> None:
    """From now on, memory that is freed stays with this process, as far as its C library can be asked for that."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 * MB)
        mallopt(M_TRIM_THRESHOLD, 512 * MB)
        mallopt(M_TOP_PAD, 16 * MB)


def channels_last(images: Tensor) -> Tensor:
    """The same images, all channels of a pixel together; also of one channel, where PyTorch sees no difference."""
    _, channels, height, width = images.shape
    laid_out = images.permute(0, 2, 3, 1).contiguous()
    return laid_out.as_strided(images.shape, (height * width * channels, 1, width * channels, channels))


class ConvReluPool2d(torch.autograd.Function):  # type: ignore[misc]
    """(samples, channels, height, width), kernels, biases, the size of a pool -> what is left of the images."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
        ctx.size, ctx.shape = size, weight.shape
        ctx.by_product = X.shape[1] == 1 and not X.requires_grad
        if ctx.by_product:
            windows = windows_of(X, weight.shape[2], weight.shape[3], size)
            kernels = torch.cat([weight.flatten(1).t(), bias[None]]) / size**2  # a mean is a sum of such parts
            images = torch.mm(windows.flatten(1).t(), kernels).relu_().view(*windows.shape[1:], -1)
            ctx.save_for_backward(windows, images)
            return images.sum(0).permute(0, 3, 1, 2)
        X, weight = channels_last(X), channels_last(weight)
        images = F.conv2d(X, weight, bias).relu_()
        ctx.save_for_backward(X, weight, images)
        return F.avg_pool2d(images, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.by_product:
            windows, images = ctx.saved_tensors
            grads = torch.ops.aten.threshold_backward(grad.permute(0, 2, 3, 1).expand_as(images), images, 0)
            found = torch.mm(windows.flatten(1), grads.view(-1, ctx.shape[0])) / ctx.size**2
            return None, found[:-1].t().reshape(ctx.shape), found[-1], None
        X, weight, images = ctx.saved_tensors
        grad = unpooled(grad, images, ctx.size)
        grad_X = input_gradient(grad, X, weight) if ctx.needs_input_grad[0] else None
        return grad_X, *conv_gradients(grad, X, weight, [False, True, True])[1:], None


def unpooled(grad: Tensor, images: Tensor, size: int) -> Tensor:
    """The gradient before pooling and ReLU, which gave `images`."""
    pool = [size, size]
    spread = torch.ops.aten.avg_pool2d_backward(channels_last(grad), images, pool, pool, [0, 0], False, True, None)
    found: Tensor = torch.ops.aten.threshold_backward(spread, images, 0)
    return found


def windows_of(X: Tensor, height: int, width: int, size: int) -> Tensor:
    """The pixels of one-channel images that a kernel meets, and a one for the bias.

    (pixel of the window, place of the window in its pool, sample, row, column of the pool)
    """
    samples, _, all_rows, all_columns = X.shape
    rows, columns = (all_rows - height + 1) // size, (all_columns - width + 1) // size
    pools, across = samples * rows * columns, size + width - 1
    near = X.contiguous().as_strided(  # all pixels that the windows of a pool meet
        (size + height - 1, across, samples, rows, columns),
        (all_columns, 1, all_rows * all_columns, size * all_columns, size),
    )
    shifts = across * pools, pools
    windows = near.contiguous().as_strided((height, width, size, size, pools), (*shifts, *shifts, 1))
    found = X.new_empty(height * width + 1, size**2, samples, rows, columns)
    found[:-1].view(windows.shape).copy_(windows)
    found[-1].fill_(1)
    return found


def input_gradient(grad: Tensor, X: Tensor, weight: Tensor) -> Tensor:
    """Of the images that went into a convolution; channels of zeros are computed too, and left out again."""
    samples, channels, height, width = X.shape
    more = -channels % LANES if channels > LANES else 0
    wide_X = X.new_empty(samples, height, width, channels + more).permute(0, 3, 1, 2)  # only its shape is looked at
    wide_weight = F.pad(weight.permute(0, 2, 3, 1), (0, more)).permute(0, 3, 1, 2)
    return conv_gradients(grad, wide_X, wide_weight, [True, False, False])[0][:, :channels]


def conv_gradients(grad: Tensor, X: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Of a convolution's images, kernels and biases."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        grad, X, weight, [len(weight)], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted
    )
    return found
