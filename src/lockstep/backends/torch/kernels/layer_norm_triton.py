"""The backward pass of layer norm in Triton: gradients and inputs are read once, for all that is needed of them."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.backends.torch.kernels.column_sum_triton import column_sums
from lockstep.backends.torch.kernels.rows_triton import load

ENTRIES = 4096  # of a tile, which a program reads at a time
MAX_PROGRAMS = 256  # two for each multiprocessor
HOW = {"num_warps": 8}
STAGES = tl.constexpr(3)  # tiles that are on their way at the same time


class Sizes(NamedTuple):
    """What the programs of a launch have in common."""

    num_rows: Any
    width: Any
    rows_of_program: Any


class Tile(NamedTuple):
    """What a kernel is compiled for; constants in it."""

    rows: tl.constexpr
    width: tl.constexpr  # at least that of a row


def layer_norm_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of inputs, weight and bias."""
    width = weight.numel()
    num_rows, tile_width = inputs.numel() // width, triton.next_power_of_2(width)
    rows = max(1, ENTRIES // tile_width)
    rows_of_program = triton.cdiv(triton.cdiv(num_rows, MAX_PROGRAMS), rows) * rows
    num_programs = triton.cdiv(num_rows, rows_of_program)
    table = inputs.new_empty(num_programs, 2 * width, dtype=torch.float32)
    found = torch.empty_like(inputs)
    pointers, sizes = (gradient, inputs, found), Sizes(num_rows, width, rows_of_program)
    tile = Tile(*map(tl.constexpr, (rows, tile_width)))
    _gradients[num_programs,](pointers, (mean, inverse), weight, table, sizes, tile, **HOW)
    d_weight, d_bias = column_sums(table, 2 * width)[0].split(width)
    return found, d_weight, d_bias


@triton.jit
def _gradients(pointers, per_row, weight, table, sizes, tile):
    """The gradients of this program's rows, and their part of those of weight and bias: a row of the table."""
    gradient, inputs, found = pointers
    mean, inverse = per_row
    column = tl.arange(0, tile.width)
    exists = column < sizes.width
    w = load(weight, column, exists)
    first = tl.program_id(0) * sizes.rows_of_program
    last = tl.minimum(first + sizes.rows_of_program, sizes.num_rows)
    total = tl.zeros([tile.rows, tile.width], dtype=tl.float32)
    product = tl.zeros([tile.rows, tile.width], dtype=tl.float32)
    for start in tl.range(first, last, tile.rows, num_stages=STAGES):
        row = start + tl.arange(0, tile.rows)
        is_there = (row < last)[:, None] & exists[None, :]
        at = row[:, None].to(tl.int64) * sizes.width + column[None, :]
        g, x = load(gradient, at, is_there), load(inputs, at, is_there)
        scale = load(inverse, row, row < last)[:, None]
        normal = tl.where(is_there, (x - load(mean, row, row < last)[:, None]) * scale, 0.0)
        weighted = g * w[None, :]
        average = tl.sum(weighted, 1)[:, None] / sizes.width
        slope = tl.sum(weighted * normal, 1)[:, None] / sizes.width
        d = (weighted - average - normal * slope) * scale
        tl.store(found + at, d.to(found.dtype.element_ty), mask=is_there)
        total += g
        product += g * normal
    at = tl.program_id(0) * 2 * sizes.width + column
    tl.store(table + at, tl.sum(product, 0), mask=exists)
    tl.store(table + at + sizes.width, tl.sum(total, 0), mask=exists)
