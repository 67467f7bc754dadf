"""Attention in Triton; in the backward pass one program for each block of keys, one for each block of queries.

Nothing is added from two places: the program of a block of keys walks over all queries and keeps the block's two sums
to itself, and so does that of a block of queries. So the order of every sum is fixed, without locks or partial sums in
memory; the price is that the scores are computed twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
# rows of queries, rows of keys, warps, stages of the pipeline: measured on an H200
FORWARD = 64, 64, 4, 3
KEYS = 32, 64, 4, 3
QUERIES = 64, 64, 4, 3


def attention_forward(
    queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, and for each query the logarithm of the sum of its exponentials."""
    num_samples, num_heads, length, width = queries.shape
    out = _empty_like(queries)
    logsumexp = queries.new_empty(num_samples, num_heads, length, dtype=torch.float32)
    rows, columns, warps, stages = FORWARD
    strides = [stride for tensor in (queries, keys, values, out) for stride in _strides(tensor)]
    sizes = is_causal, length % max(rows, columns) == 0, rows, columns, width
    _forward[triton.cdiv(length, rows), num_samples * num_heads](
        queries, keys, values, out, logsumexp, num_heads, length, scale, *strides, *sizes,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, logsumexp


def attention_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, all of shape (samples, heads, length, width)."""
    queries, keys, values = inputs
    num_samples, num_heads, length, width = queries.shape
    found = [_empty_like(tensor) for tensor in inputs]
    delta = torch.empty_like(logsumexp)
    _delta[triton.cdiv(length, 128), num_samples * num_heads](
        out, gradient, delta, num_heads, length, *_strides(out), *_strides(gradient), 128, width
    )
    arguments = (queries, keys, values, gradient, logsumexp, delta, *found, num_heads, length, scale)
    strides = [stride for tensor in (queries, keys, values, gradient, *found) for stride in _strides(tensor)]
    for kernel, (rows, columns, warps, stages), block in (
        (_keys_and_values, KEYS, KEYS[1]),
        (_queries, QUERIES, QUERIES[0]),
    ):
        sizes = is_causal, length % max(rows, columns) == 0, rows, columns, width
        grid = triton.cdiv(length, block), num_samples * num_heads
        kernel[grid](*arguments, *strides, *sizes, num_warps=warps, num_stages=stages)
    return found[0], found[1], found[2]


def _empty_like(tensor: Tensor) -> Tensor:
    """In memory as PyTorch's flash attention returns it, which compiled code relies on."""
    return torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride()[:3]  # the last is 1


@triton.jit
def _head(tensor, per_sample, per_head, num_heads):
    """Where the rows of this program's head begin."""
    head = tl.program_id(1)
    return tensor + (head // num_heads).to(tl.int64) * per_sample + (head % num_heads).to(tl.int64) * per_head


@triton.jit
def _load(rows, row, stride, length, EVEN: tl.constexpr, WIDTH: tl.constexpr):
    """Some rows of a head; those behind the end are zero."""
    at = rows + row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=(row < length)[:, None], other=0.0)


@triton.jit
def _store(rows, row, stride, numbers, length, WIDTH: tl.constexpr):
    at = rows + row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(at, numbers.to(rows.dtype.element_ty), mask=(row < length)[:, None])


@triton.jit
def _forward(
    queries, keys, values, out, logsumexp, num_heads, length, scale,
    q_sample, q_head, q_row, k_sample, k_head, k_row, v_sample, v_head, v_row, o_sample, o_head, o_row,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The output of one block of queries: first the keys that all of them see, then those that some do not."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest first, where later queries see more keys
    query = first + tl.arange(0, ROWS)
    q = _load(_head(queries, q_sample, q_head, num_heads), query, q_row, length, EVEN, WIDTH)
    k_rows = _head(keys, k_sample, k_head, num_heads)
    v_rows = _head(values, v_sample, v_head, num_heads)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([ROWS], dtype=tl.float32)
    seen = (first if CAUSAL else length) // COLUMNS * COLUMNS
    for at in tl.range(0, seen, COLUMNS):
        key = at + tl.arange(0, COLUMNS)
        k = _load(k_rows, key, k_row, length, True, WIDTH)
        v = _load(v_rows, key, v_row, length, True, WIDTH)
        total, top, sums = _add_keys(tl.dot(q, tl.trans(k)) * (scale * LOG2E), v, total, top, sums)
    for at in tl.range(seen, tl.minimum(first + ROWS, length) if CAUSAL else length, COLUMNS):
        key = at + tl.arange(0, COLUMNS)
        k = _load(k_rows, key, k_row, length, EVEN, WIDTH)
        v = _load(v_rows, key, v_row, length, EVEN, WIDTH)
        is_seen = key[None, :] < length
        if CAUSAL:
            is_seen = is_seen & (query[:, None] >= key[None, :])
        scores = tl.where(is_seen, tl.dot(q, tl.trans(k)) * (scale * LOG2E), -1e30)
        total, top, sums = _add_keys(scores, v, total, top, sums)
    _store(_head(out, o_sample, o_head, num_heads), query, o_row, total / sums[:, None], length, WIDTH)
    at_sum = logsumexp + tl.program_id(1).to(tl.int64) * length + query
    tl.store(at_sum, (top + tl.math.log2(sums)) / LOG2E, mask=query < length)


@triton.jit
def _add_keys(scores, v, total, top, sums):
    """Adds a block of keys to a running softmax, whose numbers are relative to the largest so far."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    p = tl.math.exp2(scores - new_top[:, None])
    smaller = tl.math.exp2(top - new_top)
    total = total * smaller[:, None] + tl.dot(p.to(v.dtype), v)
    return total, new_top, sums * smaller + tl.sum(p, 1)


@triton.jit
def _delta(
    out, gradient, delta, num_heads, length,
    out_sample, out_head, out_row, gradient_sample, gradient_head, gradient_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum over each row of the output times its gradient."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = _load(_head(out, out_sample, out_head, num_heads), row, out_row, length, False, WIDTH).to(tl.float32)
    y = _load(_head(gradient, gradient_sample, gradient_head, num_heads), row, gradient_row, length, False, WIDTH)
    tl.store(delta + tl.program_id(1).to(tl.int64) * length + row, tl.sum(x * y.to(tl.float32), 1), mask=row < length)


@triton.jit
def _keys_and_values(
    queries, keys, values, gradient, logsumexp, delta,
    d_queries, d_keys, d_values, num_heads, length, scale,
    q_sample, q_head, q_row, k_sample, k_head, k_row,
    v_sample, v_head, v_row, g_sample, g_head, g_row,
    dq_sample, dq_head, dq_row, dk_sample, dk_head, dk_row,
    dv_sample, dv_head, dv_row,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and values: the sum over all queries that see it."""
    first = tl.program_id(0) * COLUMNS
    key, row = first + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    k = _load(_head(keys, k_sample, k_head, num_heads), key, k_row, length, EVEN, WIDTH)
    v = _load(_head(values, v_sample, v_head, num_heads), key, v_row, length, EVEN, WIDTH)
    dk = tl.zeros([COLUMNS, WIDTH], dtype=tl.float32)
    dv = tl.zeros([COLUMNS, WIDTH], dtype=tl.float32)
    q_rows = _head(queries, q_sample, q_head, num_heads)
    g_rows = _head(gradient, g_sample, g_head, num_heads)
    per_head = tl.program_id(1).to(tl.int64) * length
    for at in tl.range((first // ROWS) * ROWS if CAUSAL else 0, length, ROWS):
        query = at + row
        q = _load(q_rows, query, q_row, length, EVEN, WIDTH)
        g = _load(g_rows, query, g_row, length, EVEN, WIDTH)
        lse = tl.load(logsumexp + per_head + query, mask=query < length, other=float("inf"))
        d = tl.load(delta + per_head + query, mask=query < length, other=0.0)
        p = tl.math.exp2(tl.dot(k, tl.trans(q)) * (scale * LOG2E) - lse[None, :] * LOG2E)
        if CAUSAL:
            p = tl.where(query[None, :] >= key[:, None], p, 0.0)
        dv += tl.dot(p.to(g.dtype), g)
        ds = p * (tl.dot(v, tl.trans(g)) - d[None, :])
        dk += tl.dot(ds.to(q.dtype), q)
    _store(_head(d_keys, dk_sample, dk_head, num_heads), key, dk_row, dk * scale, length, WIDTH)
    _store(_head(d_values, dv_sample, dv_head, num_heads), key, dv_row, dv, length, WIDTH)


@triton.jit
def _queries(
    queries, keys, values, gradient, logsumexp, delta,
    d_queries, d_keys, d_values, num_heads, length, scale,
    q_sample, q_head, q_row, k_sample, k_head, k_row,
    v_sample, v_head, v_row, g_sample, g_head, g_row,
    dq_sample, dq_head, dq_row, dk_sample, dk_head, dk_row,
    dv_sample, dv_head, dv_row,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of queries: the sum over all keys that it sees."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest first, where later queries see more keys
    query, offset = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    q = _load(_head(queries, q_sample, q_head, num_heads), query, q_row, length, EVEN, WIDTH)
    g = _load(_head(gradient, g_sample, g_head, num_heads), query, g_row, length, EVEN, WIDTH)
    per_head = tl.program_id(1).to(tl.int64) * length
    lse = tl.load(logsumexp + per_head + query, mask=query < length, other=float("inf")) * LOG2E
    d = tl.load(delta + per_head + query, mask=query < length, other=0.0)
    dq = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    k_rows = _head(keys, k_sample, k_head, num_heads)
    v_rows = _head(values, v_sample, v_head, num_heads)
    for at in tl.range(0, tl.minimum(first + ROWS, length) if CAUSAL else length, COLUMNS):
        key = at + offset
        k = _load(k_rows, key, k_row, length, EVEN, WIDTH)
        v = _load(v_rows, key, v_row, length, EVEN, WIDTH)
        p = tl.math.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2E) - lse[:, None])
        if CAUSAL:
            p = tl.where(query[:, None] >= key[None, :], p, 0.0)
        ds = p * (tl.dot(g, tl.trans(v)) - d[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    _store(_head(d_queries, dq_sample, dq_head, num_heads), query, dq_row, dq * scale, length, WIDTH)
