"""During a run on a GPU, batch norm of channels-last images is computed by our kernels, where they were measured.

PyTorch's own read the images of a small shard far more slowly than memory allows, and take a third of ResNet-50's step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch.kernels.hopper import has_memory, on_its_gpu
from lockstep.backends.torch.stacked import CannotStack, StackedTensor, joined, num_shards_of, of_shards, parted

TYPES = torch.bfloat16, torch.float16, torch.float32  # of images


def our_batch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.batch_norm`, with our kernels where they fit."""

    def batch_norm(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != 9 or not fits(*args[:6]):
            return original(*args, **kwargs)
        found: Tensor = _BatchNorm.apply(*args[:5], *args[6:8])
        return found

    return batch_norm


def fits(images: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool) -> bool:
    """By types, shapes and order in memory alone, which are the same for a shard on any device."""
    per_channel = [weight, bias] if mean is None and var is None else [weight, bias, mean, var]
    return (
        training
        and not torch.compiler.is_compiling()
        and (has_memory(images) or isinstance(images, StackedTensor))
        and images.is_cuda
        and images.ndim == 4
        and images.dtype in TYPES
        and images.is_contiguous(memory_format=torch.channels_last)
        and not images.is_contiguous()
        and all(isinstance(each, Tensor) and each.dtype == torch.float32 for each in per_channel)
        and not any(isinstance(each, StackedTensor) for each in (weight, bias))
        and all(each.is_contiguous() for each in per_channel)
    )


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    @on_its_gpu
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *how: float,
    ) -> Tensor:
        from lockstep.backends.torch.kernels.batch_norm_triton import Stats, batch_norm_forward

        momentum, eps = how
        own = [each.stack if isinstance(each, StackedTensor) else each for each in (running_mean, running_var)]
        stride = own[0].stride(0) if own[0] is not None and own[0] is not running_mean else 0
        num_shards, stats = num_shards_of(images), Stats(own[0], own[1], stride, momentum, eps)
        out, mean, inverse = batch_norm_forward(joined(images), weight, bias, stats, num_shards)
        for written in (running_mean, running_var):
            if written is not None:
                torch.autograd.graph.increment_version(written)
        ctx.save_for_backward(images, weight, mean, inverse)
        ctx.eps = eps
        return parted(out, images)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mean, inverse = ctx.saved_tensors
        if isinstance(gradient, StackedTensor) != isinstance(images, StackedTensor):
            raise CannotStack("images that all shards have in common")
        gradient = gradient.to(images.dtype).contiguous(memory_format=torch.channels_last)
        if torch.is_grad_enabled():  # its gradient is asked for, too: PyTorch knows it
            how = None, None, of_shards(mean, images), of_shards(inverse, images), True, ctx.eps, [True, True, True]
            found = torch.ops.aten.native_batch_norm_backward(gradient, images, weight, *how)
        else:
            from lockstep.backends.torch.kernels.batch_norm_triton import batch_norm_backward

            of_images, *of_layer = batch_norm_backward(joined(gradient), joined(images), weight, mean, inverse)
            found = parted(of_images, images), *(of_shards(each, images) for each in of_layer)
        return (*found, None, None, None, None)
