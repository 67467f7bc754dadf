"""During a run on a GPU, PyTorch's flash attention is computed by our kernels where they are faster.

In deterministic mode its own backward pass adds the gradients of queries in memory, in turns, and takes twice as long.
"""

import math
from typing import Any

import torch
from torch import Tensor

WIDTHS = 32, 64, 128  # of a head


def our_attention(
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
        from lockstep.backends.torch.kernels.attention_triton import attention_forward

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


def our_attention_backward(
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
        from lockstep.backends.torch.kernels import attention_triton as kernels

        gradient = gradient if gradient.stride(3) == 1 else gradient.contiguous()
        saved = kernels.Saved((queries, keys, values), out, logsumexp)
        return kernels.attention_backward(gradient, saved, _how(queries, dropout, random, is_causal, scale))
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
    from lockstep.backends.torch.kernels.attention_triton import Attention

    scale = 1 / math.sqrt(queries.shape[3]) if scale is None else scale
    return Attention(is_causal, scale, dropout, random.view(torch.int64))
