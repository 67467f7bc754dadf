"""LeNet on CPU: fused convolution + ReLU + average pool in TorchScript; the path is chosen by shapes (no autotuning).

- Images are channels-last from the first convolution on.
- Images of one channel are too small for PyTorch's convolution kernels: an im2col matrix product, biases included. Its
  rows are the first window of every pool, then the second of every pool, and so on: pooling is a sum of long rows.
- The gradient of a convolution's input is computed for a multiple of 16 channels, which fills the vector registers: a
  third faster than for LeNet's 20.
- ReLU is in place, and the three operations are one autograd node.
- Each of the four passes is a TorchScript function, which runs without the GIL. Ranks are threads of one process:
  without scripts a step of two of them takes 0.98 to 1.11 times as long (`python benchmarks/lenet.py --steps`).
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def scripted(function: Function) -> Function:
    """`function` in TorchScript: the same operations in the same order. Unchanged, if PyTorch no longer has it."""
    with warnings.catch_warnings(action="ignore"):  # deprecated in favour of torch.compile, whose bits differ
        try:
            script: Function = torch.jit.script(function)
        except (AttributeError, OSError, RuntimeError):
            return function
    return script


@scripted
def channels_last(images: Tensor) -> Tensor:
    """`images` in channels-last strides, with one channel too, where `.contiguous` leaves them as they are."""
    channels, height, width = images.size(1), images.size(2), images.size(3)
    strides = [height * width * channels, 1, width * channels, channels]
    return images.permute(0, 2, 3, 1).contiguous().as_strided(images.size(), strides)


class ConvReluPool2d(torch.autograd.Function):
    """Images, weight, bias and the size of a pool -> pooled images."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
        ctx.size, ctx.by_product = size, X.shape[1] == 1 and not X.requires_grad
        pooled, *saved = (by_product if ctx.by_product else by_convolution)(X, weight, bias, size)
        ctx.save_for_backward(*saved)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.by_product:
            weight, windows, images = ctx.saved_tensors
            return None, *product_gradients(grad, weight, windows, images, ctx.size), None
        X, weight, images = ctx.saved_tensors
        return *convolution_gradients(grad, X, weight, images, ctx.size, ctx.needs_input_grad[0]), None


@scripted
def windows_of(X: Tensor, height: int, width: int, size: int) -> Tensor:
    """im2col of one-channel images, and a row of ones for the bias.

    (pixel of the window, window of the pool, sample, row of the pool, column of the pool)
    """
    samples, all_rows, all_columns = X.size(0), X.size(2), X.size(3)
    rows, columns = (all_rows - height + 1) // size, (all_columns - width + 1) // size
    pools, across = samples * rows * columns, size + width - 1
    near = X.contiguous().as_strided(  # all pixels that the windows of a pool cover
        [size + height - 1, across, samples, rows, columns],
        [all_columns, 1, all_rows * all_columns, size * all_columns, size],
    )
    shape = [height, width, size, size, pools]
    windows = near.contiguous().as_strided(shape, [across * pools, pools, across * pools, pools, 1])
    unrolled = X.new_empty([height * width + 1, size * size, samples, rows, columns])
    unrolled[:-1].view(shape).copy_(windows)
    unrolled[-1].fill_(1)
    return unrolled


@scripted
def by_product(X: Tensor, weight: Tensor, bias: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One channel: pooled images; for backward the weight, the windows and the images before pooling."""
    windows = windows_of(X, weight.size(2), weight.size(3), size)
    kernels = torch.cat([weight.flatten(1).t(), bias.unsqueeze(0)]) / (size * size)  # a mean is a sum of such parts
    images = torch.mm(windows.flatten(1).t(), kernels).relu_()
    images = images.view([size * size, windows.size(2), windows.size(3), windows.size(4), -1])
    return images.sum(0).permute(0, 3, 1, 2), weight, windows, images


@scripted
def product_gradients(
    grad: Tensor, weight: Tensor, windows: Tensor, images: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias."""
    grads = torch.ops.aten.threshold_backward(grad.permute(0, 2, 3, 1).expand_as(images), images, 0)
    found = torch.mm(windows.flatten(1), grads.view([-1, weight.size(0)])) / (size * size)
    return found[:-1].t().reshape(weight.shape), found[-1]


@scripted
def by_convolution(X: Tensor, weight: Tensor, bias: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pooled images; for backward the input and the weight in channels-last, and the images before pooling."""
    X, weight = channels_last(X), channels_last(weight)
    images = torch.conv2d(X, weight, bias).relu_()
    return torch.ops.aten.avg_pool2d(images, [size, size]), X, weight, images


@scripted
def convolution_gradients(
    grad: Tensor, X: Tensor, weight: Tensor, images: Tensor, size: int, needs_X: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of input, weight and bias."""
    pool = [size, size]
    spread = torch.ops.aten.avg_pool2d_backward(channels_last(grad), images, pool, pool, [0, 0], False, True, None)
    grad = torch.ops.aten.threshold_backward(spread, images, 0)
    biases, ones, zeros = [weight.size(0)], [1, 1], [0, 0]
    _, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad, X, weight, biases, ones, zeros, ones, False, zeros, 1, [False, True, True]
    )
    if not needs_X:
        return None, grad_weight, grad_bias
    channels = X.size(1)
    more = -channels % 16 if channels > 16 else 0  # channels of zeros
    wide_X = X.new_empty([X.size(0), X.size(2), X.size(3), channels + more])  # only its shape is used
    wide_weight = torch.constant_pad_nd(weight.permute(0, 2, 3, 1), [0, more])
    grad_X, _, _ = torch.ops.aten.convolution_backward(
        grad, wide_X.permute(0, 3, 1, 2), wide_weight.permute(0, 3, 1, 2), biases, ones, zeros, ones, False, zeros, 1,
        [True, False, False],
    )  # fmt: skip
    return grad_X.narrow(1, 0, channels), grad_weight, grad_bias
