"""Convolutions on CPUs whose weights are large for a shard's few images: the gradient of the weights as one product.

PyTorch's own reads and writes the weights three times, in three orders. For 512 x 512 kernels of 3 x 3 and 8 images of
4 x 4 it takes 4.2 ms on a core of an EPYC with AVX-512, and this 2.5; a step of ResNet-18, batch 64, 0.95 of the time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.backends.torch.kernels.convolution import Call, pair
from lockstep.backends.torch.kernels.hopper import has_memory
from lockstep.backends.torch.matrix_products import MIN_WORK, is_plain_call, product

ROWS = 2  # pixels of a shard for each output channel: with more, PyTorch's own is faster


def our_conv2d(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.conv2d`, with our gradient of the weights where it fits."""

    def conv2d(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or len(args) < 2 or not _may_fit(args[1]):
            return original(*args, **kwargs)
        try:
            call = Call(*args, **kwargs)
        except TypeError:  # PyTorch says it in words of its own
            return original(*args, **kwargs)
        how = pair(call.stride), pair(call.padding)
        if call.groups == 1 and pair(call.dilation) == (1, 1) and fits(call.input, call.weight, call.bias, how):
            found: Tensor = _Convolution.apply(call.input, call.weight, call.bias, how)
            return found
        return original(*args, **kwargs)

    return conv2d


def _may_fit(weight: Any) -> bool:
    """Whether there are images that `fits` could take; small layers are many, and have to be told apart at once."""
    return isinstance(weight, Tensor) and weight.ndim == 4 and ROWS * len(weight) * weight.numel() >= MIN_WORK


def fits(images: Any, weight: Any, bias: Any, how: Any) -> bool:
    """By types, shapes and order in memory alone, which are the same for a shard on any device."""
    tensors = [images, weight] if bias is None else [images, weight, bias]
    if (
        not is_plain_call()
        or not all(has_memory(each) and each.device.type == "cpu" and each.dtype == torch.float32 for each in tensors)
        or not images.ndim == weight.ndim == 4
        or not all(type(number) is int for both in how for number in both)  # and no name
        or not all(len(both) == 2 for both in how)
        or min(how[0]) < 1
        or not all(each.is_contiguous(memory_format=torch.channels_last) for each in (images, weight))
        or not weight.requires_grad
        or torch.is_autocast_enabled("cpu")
    ):
        return False
    height, width = pixels_of(images, weight, *how)
    num_rows = len(images) * height * width
    return 0 < num_rows <= ROWS * len(weight) and num_rows * weight.numel() >= MIN_WORK


def pixels_of(images: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> tuple[int, ...]:
    """Lines and columns of what comes out."""
    sizes = zip(images.shape[2:], weight.shape[2:], stride, padding, strict=True)
    return tuple((size + 2 * zeros - taps) // step + 1 for size, taps, step, zeros in sizes)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.how, ctx.has_bias = how, bias is not None
        return torch.ops.aten.convolution(images, weight, bias, *how, [1, 1], False, [0, 0], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        needs_images, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_bias = needs_bias and ctx.has_bias

        def by_pytorch(*wanted: bool) -> tuple[Tensor | None, ...]:
            how = (*ctx.how, [1, 1], False, [0, 0], 1, list(wanted))
            found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
                gradient, images, weight, [len(weight)], *how
            )
            return found

        if torch.is_grad_enabled():  # its gradient is asked for, too: PyTorch knows it
            return (*by_pytorch(needs_images, needs_weight, needs_bias), None)
        of_images = by_pytorch(True, False, False)[0] if needs_images else None
        of_weight = gradient_of_weight(gradient, images, weight, *ctx.how) if needs_weight else None
        return of_images, of_weight, gradient.sum((0, 2, 3)) if needs_bias else None, None


def gradient_of_weight(
    gradient: Tensor, images: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """(output channels, pixels) x (pixels, taps and input channels): channels-last, as the weights are."""
    num_out, num_in, *taps = weight.shape
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()
    of_image, of_line, of_pixel, _ = padded.stride()
    lines, columns = gradient.shape[2:]
    windows = padded.as_strided(
        (len(images), lines, columns, *taps, num_in),
        (of_image, of_line * stride[0], of_pixel * stride[1], of_line, of_pixel, 1),
    )
    rows = gradient.permute(0, 2, 3, 1).reshape(-1, num_out)
    unrolled = windows.reshape(len(rows), -1).contiguous()  # of one image, it may be a view whose rows overlap
    found = product(rows.t(), unrolled)
    return found.view(num_out, *taps, num_in).permute(0, 3, 1, 2)
