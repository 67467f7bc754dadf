"""Attention in Triton; in the backward pass one program for each block of keys, one for each block of queries.

Nothing is added from two places: the program of a block of keys walks over all queries and keeps the block's two sums
to itself, and so does that of a block of queries. So the order of every sum is fixed, without locks or partial sums in
memory; the price is that the scores are computed twice. Which probabilities are dropped is a function of a seed and of
the positions of query and key, and is computed wherever it is needed.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.backends.torch.kernels.attention_dropout import drop, dropout_of, of_head, words_of

LOG2E = tl.constexpr(1.4426950408889634)
EVEN = 64  # a length that is a multiple of it needs no masks
# rows of queries, rows of keys, warps, stages of the pipeline, for other lengths and for such: measured on an H200
FORWARD = (64, 32, 4, 3), (64, 64, 4, 2)
KEYS = (16, 64, 4, 3), (32, 64, 4, 3)
QUERIES = (64, 32, 4, 3), (64, 64, 4, 3)
DELTA_ROWS = 128


class Heads(NamedTuple):
    """A tensor of shape (samples, heads, length, width), as a kernel sees it: where it is, and its strides."""

    data: Any
    sample: Any
    head: Any
    row: Any


class Sizes(NamedTuple):
    """What the programs of one launch have in common."""

    num_heads: Any
    length: Any
    scale: Any


class Tile(NamedTuple):
    """What a kernel is compiled for; constants in it."""

    rows: tl.constexpr  # of queries
    columns: tl.constexpr  # rows of keys
    width: tl.constexpr  # of a head
    is_causal: tl.constexpr
    is_even: tl.constexpr  # the length is a multiple of rows and columns: nothing has to be masked


class Attention(NamedTuple):
    """What is the same in the forward and the backward pass."""

    is_causal: bool
    scale: float
    dropout: float
    seed: Tensor  # of dropout: one integer


def attention_forward(inputs: tuple[Tensor, Tensor, Tensor], how: Attention) -> tuple[Tensor, Tensor]:
    """The output, and for each query the logarithm of the sum of its exponentials."""
    queries = inputs[0]
    num_samples, num_heads, length, _ = queries.shape
    out = _empty_like(queries)
    logsumexp = queries.new_empty(num_samples, num_heads, length, dtype=torch.float32)
    given, sizes = tuple(map(_heads, inputs)), Sizes(num_heads, length, how.scale)
    tile, options = _tile(FORWARD, queries, how.is_causal)
    grid = triton.cdiv(length, tile.rows.value), num_samples * num_heads
    _forward[grid](given, _heads(out), logsumexp, sizes, dropout_of(how.dropout, how.seed, logsumexp), tile, **options)
    return out, logsumexp


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    inputs: tuple[Tensor, Tensor, Tensor]  # queries, keys and values, of shape (samples, heads, length, width)
    out: Tensor
    logsumexp: Tensor


def attention_backward(gradient: Tensor, saved: Saved, how: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    inputs, out, logsumexp = saved
    num_samples, num_heads, length, width = inputs[0].shape
    queries, keys, values = (_empty_like(tensor) for tensor in inputs)
    delta, sizes = torch.empty_like(logsumexp), Sizes(num_heads, length, how.scale)
    _delta[triton.cdiv(length, DELTA_ROWS), num_samples * num_heads](
        _heads(out), _heads(gradient), delta, sizes, DELTA_ROWS, width
    )
    given, sums = (*map(_heads, inputs), _heads(gradient)), (logsumexp, delta)
    dropout = dropout_of(how.dropout, how.seed, logsumexp)
    tile, options = _tile(KEYS, inputs[0], how.is_causal)
    grid = triton.cdiv(length, tile.columns.value), num_samples * num_heads
    _keys_and_values[grid](given, sums, (_heads(keys), _heads(values)), sizes, dropout, tile, **options)
    tile, options = _tile(QUERIES, inputs[0], how.is_causal)
    grid = triton.cdiv(length, tile.rows.value), num_samples * num_heads
    _queries[grid](given, sums, _heads(queries), sizes, dropout, tile, **options)
    return queries, keys, values


def _empty_like(tensor: Tensor) -> Tensor:
    """In memory as PyTorch's flash attention returns it, which compiled code relies on."""
    return torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2)


def _heads(tensor: Tensor) -> Heads:
    return Heads(tensor, *tensor.stride()[:3])  # the last is 1


def _tile(chosen: tuple[tuple[int, ...], ...], queries: Tensor, is_causal: bool) -> tuple[Tile, dict[str, int]]:
    length, width = queries.shape[2:]
    is_even = length % EVEN == 0
    rows, columns, warps, stages = chosen[is_even]
    tile = Tile(*map(tl.constexpr, (rows, columns, width, is_causal, is_even)))
    return tile, {"num_warps": warps, "num_stages": stages}


@triton.jit
def _rows(heads, num_heads):
    """Where the rows of this program's head begin."""
    head = tl.program_id(1)
    return heads.data + (head // num_heads).to(tl.int64) * heads.sample + (head % num_heads).to(tl.int64) * heads.head


@triton.jit
def _load(heads, row, sizes, EVEN: tl.constexpr, WIDTH: tl.constexpr):
    """Some rows of this program's head; those behind the end are zero."""
    at = _rows(heads, sizes.num_heads) + row[:, None] * heads.row + tl.arange(0, WIDTH)[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=(row < sizes.length)[:, None], other=0.0)


@triton.jit
def _store(heads, row, numbers, sizes, WIDTH: tl.constexpr):
    at = _rows(heads, sizes.num_heads) + row[:, None] * heads.row + tl.arange(0, WIDTH)[None, :]
    tl.store(at, numbers.to(heads.data.dtype.element_ty), mask=(row < sizes.length)[:, None])


@triton.jit
def _forward(inputs, out, logsumexp, sizes, dropout, tile):
    """The output of one block of queries: first the keys that all of them see, then those that some do not."""
    queries, keys, values = inputs
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile.rows  # the longest first: later queries see more keys
    query = first + tl.arange(0, tile.rows)
    q = _load(queries, query, sizes, tile.is_even, tile.width)
    total = tl.zeros([tile.rows, tile.width], dtype=tl.float32)
    top = tl.full([tile.rows], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([tile.rows], dtype=tl.float32)
    of_queries = words_of(dropout, query, sizes, tile, 0)
    seen = (first if tile.is_causal else sizes.length) // tile.columns * tile.columns
    for at in tl.range(0, seen, tile.columns):
        key = at + tl.arange(0, tile.columns)
        k = _load(keys, key, sizes, True, tile.width)
        v = _load(values, key, sizes, True, tile.width)
        words = of_queries, words_of(dropout, key, sizes, tile, 1)
        total, top, sums = _add_keys(tl.dot(q, tl.trans(k)), v, (total, top, sums), words, sizes, dropout)
    end = tl.minimum(first + tile.rows, sizes.length) if tile.is_causal else sizes.length
    for at in tl.range(seen, end, tile.columns):
        key = at + tl.arange(0, tile.columns)
        k = _load(keys, key, sizes, tile.is_even, tile.width)
        v = _load(values, key, sizes, tile.is_even, tile.width)
        is_seen = key[None, :] < sizes.length
        if tile.is_causal:
            is_seen = is_seen & (query[:, None] >= key[None, :])
        scores = tl.where(is_seen, tl.dot(q, tl.trans(k)), -1e30)
        words = of_queries, words_of(dropout, key, sizes, tile, 1)
        total, top, sums = _add_keys(scores, v, (total, top, sums), words, sizes, dropout)
    divisor = sums
    if dropout.words is not None:
        divisor = sums * dropout.share
    _store(out, query, total / divisor[:, None], sizes, tile.width)
    at_sum = logsumexp + tl.program_id(1).to(tl.int64) * sizes.length + query
    tl.store(at_sum, (top + tl.math.log2(sums)) / LOG2E, mask=query < sizes.length)


@triton.jit
def _add_keys(scores, v, running, words, sizes, dropout):
    """Adds a block of keys to a running softmax, whose numbers are relative to the largest so far."""
    total, top, sums = running
    factor = sizes.scale * LOG2E  # larger than 0
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    p = tl.math.exp2(scores * factor - new_top[:, None])
    smaller = tl.math.exp2(top - new_top)
    sums = sums * smaller + tl.sum(p, 1)
    if dropout.words is not None:
        p = drop(p, words[0], words[1], dropout)
    return total * smaller[:, None] + tl.dot(p.to(v.dtype), v), new_top, sums


@triton.jit
def _delta(out, gradient, delta, sizes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum over each row of the output times its gradient."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = _load(out, row, sizes, False, WIDTH).to(tl.float32)
    y = _load(gradient, row, sizes, False, WIDTH).to(tl.float32)
    at = delta + tl.program_id(1).to(tl.int64) * sizes.length + row
    tl.store(at, tl.sum(x * y, 1), mask=row < sizes.length)


@triton.jit
def _of_queries(sums, query, sizes, dropout, tile):
    """For each query the logarithm of base 2 of its sum of exponentials, and its delta.

    With dropout, the probabilities that follow from the first are those divided by the share that is kept.
    """
    lse = of_head(sums[0], tl.program_id(1), query, sizes, tile.is_even, float("inf")) * LOG2E
    d = of_head(sums[1], tl.program_id(1), query, sizes, tile.is_even, 0.0)
    if dropout.words is not None:
        lse, d = lse + tl.math.log2(dropout.share), d * dropout.share
    return lse, d


@triton.jit
def _keys_and_values(given, sums, found, sizes, dropout, tile):
    """The gradients of one block of keys and values: the sum over all queries that see it."""
    queries, keys, values, gradient = given
    first = tl.program_id(0) * tile.columns
    key, row = first + tl.arange(0, tile.columns), tl.arange(0, tile.rows)
    k = _load(keys, key, sizes, tile.is_even, tile.width)
    v = _load(values, key, sizes, tile.is_even, tile.width)
    dk = tl.zeros([tile.columns, tile.width], dtype=tl.float32)
    dv = tl.zeros([tile.columns, tile.width], dtype=tl.float32)
    of_keys = words_of(dropout, key, sizes, tile, 1)
    for at in tl.range((first // tile.rows) * tile.rows if tile.is_causal else 0, sizes.length, tile.rows):
        query = at + row
        q = _load(queries, query, sizes, tile.is_even, tile.width)
        g = _load(gradient, query, sizes, tile.is_even, tile.width)
        lse, delta = _of_queries(sums, query, sizes, dropout, tile)
        p = tl.math.exp2(tl.dot(k, tl.trans(q)) * (sizes.scale * LOG2E) - lse[None, :])
        if tile.is_causal:
            p = tl.where(query[None, :] >= key[:, None], p, 0.0)
        dp = tl.dot(v, tl.trans(g))
        if dropout.words is None:
            dv += tl.dot(p.to(g.dtype), g)
            ds = p * (dp - delta[None, :])
        else:
            kept = drop(p, of_keys, words_of(dropout, query, sizes, tile, 0), dropout)
            dv += tl.dot(kept.to(g.dtype), g)
            ds = kept * dp - p * delta[None, :]
        dk += tl.dot(ds.to(q.dtype), q)
    _store(found[0], key, dk * sizes.scale, sizes, tile.width)
    _store(found[1], key, dv, sizes, tile.width)


@triton.jit
def _queries(given, sums, d_queries, sizes, dropout, tile):
    """The gradients of one block of queries: the sum over all keys that it sees."""
    queries, keys, values, gradient = given
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile.rows  # the longest first: later queries see more keys
    query = first + tl.arange(0, tile.rows)
    q = _load(queries, query, sizes, tile.is_even, tile.width)
    g = _load(gradient, query, sizes, tile.is_even, tile.width)
    lse, delta = _of_queries(sums, query, sizes, dropout, tile)
    dq = tl.zeros([tile.rows, tile.width], dtype=tl.float32)
    of_queries = words_of(dropout, query, sizes, tile, 0)
    for at in tl.range(
        0, tl.minimum(first + tile.rows, sizes.length) if tile.is_causal else sizes.length, tile.columns
    ):
        key = at + tl.arange(0, tile.columns)
        k = _load(keys, key, sizes, tile.is_even, tile.width)
        v = _load(values, key, sizes, tile.is_even, tile.width)
        p = tl.math.exp2(tl.dot(q, tl.trans(k)) * (sizes.scale * LOG2E) - lse[:, None])
        if tile.is_causal:
            p = tl.where(query[:, None] >= key[None, :], p, 0.0)
        dp = tl.dot(g, tl.trans(v))
        if dropout.words is None:
            ds = p * (dp - delta[:, None])
        else:
            ds = drop(p, of_queries, words_of(dropout, key, sizes, tile, 1), dropout) * dp - p * delta[:, None]
        dq += tl.dot(ds.to(k.dtype), k)
    _store(d_queries, query, dq * sizes.scale, sizes, tile.width)
