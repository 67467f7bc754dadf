"""During a run on a GPU, PyTorch's flash attention is computed by our kernels where they are faster.

In deterministic mode its own backward pass adds the gradients of queries in memory, in turns, and takes twice as long.
"""

import importlib.util
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDTHS = 32, 64, 128  # of a head
HOPPER = 9, 0  # what it was measured on


@cache
def can_replace() -> bool:
    """Whether the kernels run here: on all GPUs of this machine, or on none, so that all have the same bits."""
    gpus = range(torch.cuda.device_count())
    return (
        bool(gpus)
        and importlib.util.find_spec("triton") is not None
        and any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang")))  # with which Triton builds launchers
        and all(torch.cuda.get_device_capability(gpu) == HOPPER for gpu in gpus)
    )


def has_memory(tensor: Any) -> bool:
    """Whether a kernel can be given it.

    Code that is being compiled is traced with tensors that are only described, and within `torch.func` a tensor may
    stand for several, or for one with a tangent.
    """
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@contextmanager
def deterministic_attention() -> Iterator[None]:
    """While it is entered, flash attention is ours: in eager, captured and compiled code."""
    if not can_replace():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        library.impl("_scaled_dot_product_flash_attention", _forward, "CUDA")
        library.impl("_scaled_dot_product_flash_attention_backward", _backward, "CUDA")
    try:
        yield
    finally:
        library._destroy()


def _forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """As PyTorch declares it: its output, and what its backward pass needs."""
    lengths = queries.shape[2], keys.shape[2]
    if _fits(queries, keys, values, dropout, scale):
        from lockstep.backends.torch_attention_kernels import attention_forward

        random = queries.new_empty(2, dtype=torch.int64)
        if dropout:
            random.random_()  # from the generator that PyTorch's own kernel would use
        how = _how(queries, dropout, random, is_causal, scale)
        out, logsumexp = attention_forward((queries, keys, values), how)
        unused = queries.new_empty((), dtype=torch.uint64)
        return out, logsumexp, None, None, *lengths, random.view(torch.uint64), unused, queries.new_empty(0)
    swapped = [tensor.transpose(1, 2) for tensor in (queries, keys, values)]
    how = None, None, *lengths, dropout, is_causal, return_debug_mask
    out, logsumexp, *others = torch.ops.aten._flash_attention_forward(*swapped, *how, scale=scale)
    return out.transpose(1, 2), logsumexp, None, None, *lengths, *others


def _backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """As PyTorch declares it."""
    *_, dropout, is_causal, random, _ = others
    if _fits(queries, keys, values, dropout, scale):
        from lockstep.backends.torch_attention_kernels import Saved, attention_backward

        gradient = gradient if gradient.stride(3) == 1 else gradient.contiguous()
        saved = Saved((queries, keys, values), out, logsumexp)
        return attention_backward(gradient, saved, _how(queries, dropout, random, is_causal, scale))
    swapped = [tensor.transpose(1, 2) for tensor in (gradient, queries, keys, values, out)]
    theirs = torch.ops.aten._flash_attention_backward(*swapped, logsumexp, *others, scale=scale)
    return tuple(tensor.transpose(1, 2) for tensor in theirs)


def _fits(queries: Tensor, keys: Tensor, values: Tensor, dropout: float, scale: float | None) -> bool:
    """By numbers, types, shapes and order in memory alone, which are the same for a shard on any device."""
    return (
        queries.shape == keys.shape == values.shape
        and queries.shape[3] in WIDTHS
        and queries.dtype in (torch.bfloat16, torch.float16)
        and all(tensor.stride(3) == 1 for tensor in (queries, keys, values))
        and dropout < 1
        and (scale is None or scale > 0)
    )


def _how(queries: Tensor, dropout: float, random: Tensor, is_causal: bool, scale: float | None) -> Any:
    from lockstep.backends.torch_attention_kernels import Attention

    scale = 1 / math.sqrt(queries.shape[3]) if scale is None else scale
    return Attention(is_causal, scale, dropout, random.view(torch.int64))
