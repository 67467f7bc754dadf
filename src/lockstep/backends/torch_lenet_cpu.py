"""A convolution, ReLU and average pooling on one CPU core, arranged for its cache and its vector units.

- Images lie channels-last (all channels of a pixel together), from the first convolution on.
- Images of one channel are too few numbers for a convolution's kernels: a matrix product does them, biases included.
  Its rows are the first window of every pool, then the second of every pool, and so on: to pool is to add long rows.
- The gradient of a convolution's input is computed for a number of channels that fills vectors of 16: a third faster
  than for 20 channels, four of which would be left over.
- ReLU overwrites what the convolution gave, and the three are one step of the backward pass.
- Each of its four passes is a script that runs without the interpreter. Ranks are threads of one process, and of those
  only one at a time can be in the interpreter: with scripts, two of them lose 4 % to each other, without 12 %.
- Memory that a shard frees is kept for the next one. To give it back and get it again is a page fault for every 4 kB.

Which way is taken depends on shapes alone, never on a stopwatch: two runs must take the same.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

LANES = 16  # float32 numbers in the widest vectors
Function = TypeVar("Function", bound=Callable[..., Any])


def scripted(function: Function) -> Function:
    """`function` as a script: the same operations, one after the other. As it is, where PyTorch has none any more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is to be superseded by compilers, whose bits are their own
        try:
            script: Function = torch.jit.script(function)
        except (AttributeError, OSError, RuntimeError):
            return function
    return script


@scripted
def channels_last(images: Tensor) -> Tensor:
    """The same images, all channels of a pixel together; also of one channel, where PyTorch sees no difference."""
    samples, channels, height, width = images.size(0), images.size(1), images.size(2), images.size(3)
    laid_out = images.permute(0, 2, 3, 1).contiguous()
    return laid_out.as_strided(
        [samples, channels, height, width], [height * width * channels, 1, width * channels, channels]
    )


class ConvReluPool2d(torch.autograd.Function):
    """(samples, channels, height, width), kernels, biases, the size of a pool -> what is left of the images."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
        ctx.size, ctx.by_product = size, X.shape[1] == 1 and not X.requires_grad
        pooled, *kept = (by_product if ctx.by_product else by_convolution)(X, weight, bias, size)
        ctx.save_for_backward(weight, *kept)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.by_product:
            weight, windows, images = ctx.saved_tensors
            return None, *product_gradients(grad, weight, windows, images, ctx.size), None
        weight, X, laid_out, images = ctx.saved_tensors
        num_channels = weight.shape[1]
        more = -num_channels % LANES if num_channels > LANES else 0
        needs_X = ctx.needs_input_grad[0]
        return *convolution_gradients(grad, weight, X, laid_out, images, ctx.size, more, needs_X), None


@scripted
def windows_of(X: Tensor, height: int, width: int, size: int) -> Tensor:
    """The pixels of one-channel images that a kernel meets, and a one for the bias.

    (pixel of the window, place of the window in its pool, sample, row, column of the pool)
    """
    samples, all_rows, all_columns = X.size(0), X.size(2), X.size(3)
    rows, columns = (all_rows - height + 1) // size, (all_columns - width + 1) // size
    pools, across = samples * rows * columns, size + width - 1
    near = X.contiguous().as_strided(  # all pixels that the windows of a pool meet
        [size + height - 1, across, samples, rows, columns],
        [all_columns, 1, all_rows * all_columns, size * all_columns, size],
    )
    shape = [height, width, size, size, pools]
    windows = near.contiguous().as_strided(shape, [across * pools, pools, across * pools, pools, 1])
    found = X.new_empty([height * width + 1, size * size, samples, rows, columns])
    found[:-1].view(shape).copy_(windows)
    found[-1].fill_(1)
    return found


@scripted
def by_product(X: Tensor, weight: Tensor, bias: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is left of images of one channel; their windows, and what they were before pooling."""
    windows = windows_of(X, weight.size(2), weight.size(3), size)
    kernels = torch.cat([weight.flatten(1).t(), bias.unsqueeze(0)]) / (size * size)  # a mean is a sum of such parts
    images = torch.mm(windows.flatten(1).t(), kernels).relu_()
    images = images.view([size * size, windows.size(2), windows.size(3), windows.size(4), -1])
    return images.sum(0).permute(0, 3, 1, 2), windows, images


@scripted
def product_gradients(
    grad: Tensor, weight: Tensor, windows: Tensor, images: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Of the kernels and the biases."""
    grads = torch.ops.aten.threshold_backward(grad.permute(0, 2, 3, 1).expand_as(images), images, 0)
    found = torch.mm(windows.flatten(1), grads.view([-1, weight.size(0)])) / (size * size)
    return found[:-1].t().reshape(weight.shape), found[-1]


@scripted
def by_convolution(X: Tensor, weight: Tensor, bias: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is left of the images; images and kernels, channels-last; what was there to be pooled."""
    X, laid_out = channels_last(X), channels_last(weight)
    images = torch.conv2d(X, laid_out, bias).relu_()
    return torch.ops.aten.avg_pool2d(images, [size, size]), X, laid_out, images


@scripted
def convolution_gradients(
    grad: Tensor, weight: Tensor, X: Tensor, laid_out: Tensor, images: Tensor, size: int, more: int, needs_X: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Of the images that went in, the kernels and the biases. `more` channels of zeros are computed beside theirs."""
    pool = [size, size]
    spread = torch.ops.aten.avg_pool2d_backward(channels_last(grad), images, pool, pool, [0, 0], False, True, None)
    grad = torch.ops.aten.threshold_backward(spread, images, 0)
    biases, ones, zeros = [weight.size(0)], [1, 1], [0, 0]
    _, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad, X, laid_out, biases, ones, zeros, ones, False, zeros, 1, [False, True, True]
    )
    if not needs_X:
        return None, grad_weight, grad_bias
    channels = X.size(1)
    wide_X = X.new_empty([X.size(0), X.size(2), X.size(3), channels + more])  # only its shape is looked at
    wide_weight = torch.constant_pad_nd(laid_out.permute(0, 2, 3, 1), [0, more])
    grad_X, _, _ = torch.ops.aten.convolution_backward(
        grad, wide_X.permute(0, 3, 1, 2), wide_weight.permute(0, 3, 1, 2), biases, ones, zeros, ones, False, zeros, 1,
        [True, False, False],
    )  # fmt: skip
    return grad_X.narrow(1, 0, channels), grad_weight, grad_bias
