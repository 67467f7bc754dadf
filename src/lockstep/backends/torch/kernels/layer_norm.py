"""During a run on a GPU, the backward pass of layer norm is computed by our kernel.

PyTorch's own reads gradients and inputs twice, and for the gradients of weight and bias with few programs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch.kernels.hopper import has_memory
from lockstep.backends.torch.stacked import CannotStack, StackedTensor, per_shard

TYPES = torch.bfloat16, torch.float16, torch.float32  # autocast makes all of them float32
MIN_ROWS, MAX_WIDTH = 256, 8192


def our_layer_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.layer_norm`, with our backward pass where it fits."""

    def layer_norm(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling() and any(isinstance(each, StackedTensor) for each in args):
            return per_shard(layer_norm)(*args, **kwargs)
        if kwargs or len(args) != 6 or not fits(*args[:4]):
            return original(*args, **kwargs)
        rows, _, weight, bias, eps, _ = args
        found: Tensor = _LayerNorm.apply(rows.float(), weight, bias, eps)
        return found

    return layer_norm


def fits(rows: Any, shape: Sequence[int], weight: Any, bias: Any) -> bool:
    """By types, shapes and order in memory alone, which are the same for a shard on any device."""
    return (
        len(shape) == 1
        and not torch.compiler.is_compiling()
        and has_memory(rows)
        and rows.is_cuda
        and rows.dtype in (TYPES if torch.is_autocast_enabled("cuda") else TYPES[-1:])
        and rows.is_contiguous()
        and rows.numel() >= MIN_ROWS * shape[0]
        and shape[0] <= MAX_WIDTH
        and all(isinstance(each, Tensor) and each.dtype == torch.float32 for each in (weight, bias))
        and all(each.is_contiguous() for each in (weight, bias))
    )


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, mean, inverse = torch.native_layer_norm(rows, weight.shape, weight, bias, eps)
        ctx.save_for_backward(rows, weight, bias, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, mean, inverse = ctx.saved_tensors
        if isinstance(gradient, StackedTensor):
            raise CannotStack("rows that all shards have in common")
        gradient = gradient.contiguous()
        if torch.is_grad_enabled():  # its gradient is asked for, too: PyTorch knows it
            how = weight.shape, mean, inverse, weight, bias, [True, True, True]
            found = torch.ops.aten.native_layer_norm_backward(gradient, rows, *how)
        else:
            from lockstep.backends.torch.kernels.layer_norm_triton import layer_norm_backward

            found = layer_norm_backward(gradient, rows, weight, mean, inverse)
        return (*found, None)
