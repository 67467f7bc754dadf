"""During a run on a GPU, convolutions of shards with few images are computed by our kernels.

cuDNN chooses its kernels by the number of images, so shards have to be computed one by one, and 32 images of 7 x 7
pixels do not fill a GPU. Ours give a shard the same bits alone and beside others, so that shards can go through a model
together (`backends/torch/stacked.py`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.backends.torch.kernels.hopper import has_memory, on_its_gpu
from lockstep.backends.torch.kernels.weight_gradient_tf32 import can_multiply, weight_gradient
from lockstep.backends.torch.stacked import CannotStack, StackedTensor, joined, num_shards_of, of_shards, parted

MAX_IMAGES = 64  # of a shard: more of them fill a GPU by themselves, and cuDNN's kernels are faster
MAX_NUMBERS = 1 << 27  # of a shard's images: places in those of eight shards have 31 bits
MAX_LINES = 4096  # and columns, of images: kernels have no bits for more
DEPTH = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}  # channels that are added at a time


class Call(NamedTuple):
    """The arguments of `torch.conv2d`."""

    input: Any
    weight: Any
    bias: Any = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: Any = 1


def our_conv2d(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.conv2d`, with our kernels where they fit."""

    def conv2d(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        call = Call(*args, **kwargs)
        how = pair(call.stride), pair(call.padding)
        if call.groups == 1 and pair(call.dilation) == (1, 1) and fits(call.input, call.weight, call.bias, how):
            dtype = _computed_in(call.input)
            bias = None if call.bias is None else call.bias.to(dtype)
            found: Tensor = _Convolution.apply(call.input.to(dtype), call.weight.to(dtype), bias, how)
            return found
        return original(*args, **kwargs)

    return conv2d


def fits(images: Any, weight: Any, bias: Any, how: Any) -> bool:
    """By types, shapes, order in memory and the run's precision, which are the same for a shard on any device."""
    if not (has_memory(images) or isinstance(images, StackedTensor)):
        return False
    dtype, tensors = _computed_in(images), [weight] if bias is None else [weight, bias]
    return (
        all(isinstance(number, int) for pair in how for number in pair)  # and no name
        and all(has_memory(each) and each.device == images.device and _computed_in(each) == dtype for each in tensors)
        and images.is_cuda
        and images.ndim == weight.ndim == 4
        and dtype in DEPTH
        and (dtype != torch.float32 or torch.backends.cudnn.conv.fp32_precision == "tf32")
        and images.shape[1] == weight.shape[1]
        and all(channels % DEPTH[dtype] == 0 for channels in weight.shape[:2])
        and _has_fitting_sizes(images, weight, *how)
        and all(each.is_contiguous(memory_format=torch.channels_last) for each in (images, weight))
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def _has_fitting_sizes(images: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> bool:
    padded = [size + 2 * zeros for size, zeros in zip(images.shape[2:], padding, strict=True)]
    return (
        0 < len(images) <= MAX_IMAGES
        and min(stride) > 0
        and min(padding) >= 0
        and max(*padded, *stride) < MAX_LINES
        and all(taps <= size for taps, size in zip(weight.shape[2:], padded, strict=True))
        and len(images) * max(weight.shape[:2]) * math.prod(padded) <= MAX_NUMBERS
    )


def _computed_in(tensor: Tensor) -> torch.dtype:
    """The type that autocast makes of a tensor's."""
    is_cast = tensor.is_cuda and tensor.dtype in DEPTH and torch.is_autocast_enabled("cuda")
    return torch.get_autocast_dtype("cuda") if is_cast else tensor.dtype


def pair(value: Any) -> Any:
    """Of lines and columns; a name stays a name."""
    if isinstance(value, (tuple, list)):
        return tuple(value) * (2 if len(value) == 1 else 1)
    return value if isinstance(value, str) else (value, value)


class _Convolution(torch.autograd.Function):
    @staticmethod
    @on_its_gpu
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        from lockstep.backends.torch.kernels.convolution_triton import Convolution, Launch, convolution_forward

        ctx.save_for_backward(images, weight)
        ctx.how, ctx.has_bias = Convolution(*how), bias is not None
        launch = Launch(*tile_of_images(weight, weight.shape[1], len(weight), (1, 1)))
        return parted(convolution_forward(joined(images), weight, bias, ctx.how, launch), images)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from lockstep.backends.torch.kernels.column_sum_triton import column_sums
        from lockstep.backends.torch.kernels.convolution_triton import Launch, gradient_of_images
        from lockstep.backends.torch.kernels.weight_gradient_triton import gradient_of_weight

        images, weight = ctx.saved_tensors
        if isinstance(gradient, StackedTensor) != isinstance(images, StackedTensor):
            raise CannotStack("images that all shards have in common")
        gradient = gradient.to(images.dtype).contiguous(memory_format=torch.channels_last)
        if torch.is_grad_enabled():  # its gradient is asked for, too: PyTorch knows it
            how = (*ctx.how, [1, 1], False, [0, 0], 1, [*ctx.needs_input_grad[:2], ctx.has_bias])
            found = torch.ops.aten.convolution_backward(gradient, images, weight, [len(weight)], *how)
            return (*found, None)
        of_images = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            launch = Launch(*tile_of_images(weight, len(weight), weight.shape[1], ctx.how.stride))
            of_images = gradient_of_images(joined(gradient), weight, images.shape[2:], ctx.how, launch)
            of_images = parted(of_images, images)
        if ctx.needs_input_grad[1]:
            tensors, num_shards = (joined(images), joined(gradient)), num_shards_of(images)
            if weight.dtype == torch.float32 and can_multiply():
                found = weight_gradient(*tensors, weight.shape, ctx.how, num_shards)
            else:
                found = gradient_of_weight(*tensors, weight, num_shards, ctx.how, Launch(*tile_of_weight(weight)))
            of_weight = of_shards(found.permute(0, 1, 4, 2, 3), images)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = of_shards(column_sums(joined(gradient), len(weight), num_shards_of(gradient)), gradient)
        return of_images, of_weight, of_bias, None


def tile_of_images(weight: Tensor, num_in: int, num_out: int, stride: tuple[int, int]) -> tuple[int, ...]:
    """Rows, columns and depth of a tile, warps and stages, for a product of `num_in` and `num_out` channels.

    The rules take 1.01 of the time of the fastest of seven to twelve tiles for each layer of ResNet-18 (tf32) and
    ResNet-50 (bf16), eight shards of 32 images at once, on an H200.
    """
    is_point, is_strided = weight.shape[2] * weight.shape[3] == 1, max(stride) > 1
    if weight.dtype == torch.float32:
        return (128, 64, 32, 4, 3) if num_out <= 64 else (64, 128, 32, 4, 3)
    if num_out <= 64:
        return 128, 64, 64, 4, 2 if is_point else 3
    if is_strided:  # in a gradient of images
        return 128, 128, 64, 4, 2 if is_point else 3
    return (128, 128, 64, 4, 2) if is_point and num_in <= 512 else (128, 128, 64, 8, 3)


def tile_of_weight(weight: Tensor) -> tuple[int, ...]:
    """The same for the gradient of a weight, and into how many parts the pixels of a shard are cut.

    More than two warps would use instructions that read float32 numbers in another order than they are in memory.
    """
    num_out, num_in, *taps = weight.shape
    if weight.dtype == torch.float32:
        tile, min_tiles = (64, 64, 32, 2, 3), 144
    elif min(num_out, num_in) <= 64:
        tile, min_tiles = (64, 64, 64, 4, 4), 72 if max(taps) > 1 else 36
    else:
        tile, min_tiles = (128, 128, 32, 4, 4), 72 if max(taps) > 1 else 18
    num_tiles = -(-num_out // tile[0]) * -(-num_in // tile[1]) * taps[0] * taps[1]
    return *tile, max(1, -(-min_tiles // num_tiles))
