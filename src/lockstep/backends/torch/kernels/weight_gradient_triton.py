"""The gradient of a convolution's weight in Triton, for the images of several shards at once.

    gradient[channel, tap, c] = sum over pixels of gradient_of_output[pixel, channel] * images[pixel moved by tap, c]

Each shard has one of its own: its pixels are cut into parts by its size alone, and the parts are added in their order.
So a shard has the same bits alone and beside others.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.backends.torch.kernels.convolution_triton import GENERAL, Convolution, Launch, unpacked


def gradient_of_weight(
    images: Tensor, gradient: Tensor, weight: Tensor, num_shards: int, how: Convolution, launch: Launch
) -> Tensor:
    """For each of `num_shards` shards that the images are those of, the gradient of the weight.

    Its shape is (shards, channels, lines, columns, c).
    """
    num_rows = gradient.numel() // gradient.shape[1] // num_shards
    channels, taps = (images.shape[1], len(weight)), weight.shape[2:]
    parts = min(launch.parts, triton.cdiv(num_rows, launch.depth))
    dtype = weight.dtype if parts == 1 else torch.float32
    table = weight.new_empty((parts, num_shards, len(weight), *taps, channels[0]), dtype=dtype)
    tiles = triton.cdiv(channels[1], launch.rows) * math.prod(taps) * triton.cdiv(channels[0], launch.columns)
    lines, columns = (axis.packed for axis in how.axes(images.shape[2:], taps))
    grid, pointers = (tiles, parts, num_shards), (images, gradient, table)
    _weight_parts[grid](pointers, num_rows, lines, columns, channels, launch.tile(), **launch.options)
    return add_parts(table, weight.dtype)


def add_parts(table: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the parts of a table, from the first to the last."""
    if len(table) == 1:
        return table[0]
    out = torch.empty_like(table[0], dtype=dtype)
    _add_parts[(triton.cdiv(out.numel(), 1024),)](table, out, out.numel(), len(table), num_warps=4)
    return out


@triton.jit(do_not_specialize=GENERAL)
def _weight_parts(pointers, num_rows, lines, columns, channels, tile):
    """One tile of a weight's gradient, for one tap: the sum over the pixels of one part of one shard."""
    images, gradient, table = pointers
    line_size, line_out_size, line_taps, line_stride, line_padding = unpacked(lines)
    column_size, column_out_size, column_taps, column_stride, column_padding = unpacked(columns)
    num_in, num_out = channels
    num_tiles, num_taps = tl.cdiv(num_in, tile.columns), line_taps * column_taps
    part, shard = tl.program_id(1), tl.program_id(2)
    tap = tl.program_id(0) // num_tiles % num_taps
    c = tl.program_id(0) % num_tiles * tile.columns + tl.arange(0, tile.columns)
    channel = tl.program_id(0) // num_tiles // num_taps * tile.rows + tl.arange(0, tile.rows)
    is_c, is_channel = c < num_in, channel < num_out
    rows_of_part = tl.cdiv(tl.cdiv(num_rows, tl.num_programs(1)), tile.depth) * tile.depth
    first = part * rows_of_part
    last = tl.minimum(first + rows_of_part, num_rows)
    row = first + tl.arange(0, tile.depth)
    column, line = row % column_out_size, row // column_out_size % line_out_size
    num_pixels = column_out_size * line_out_size
    image = row // num_pixels + shard * (num_rows // num_pixels)
    # how far the next rows are
    next_column, next_line = tile.depth % column_out_size, tile.depth // column_out_size % line_out_size
    next_image = tile.depth // num_pixels
    total = tl.zeros([tile.rows, tile.columns], dtype=tl.float32)
    for _ in range(0, tl.cdiv(last - first, tile.depth)):
        is_row = row < last
        at = (shard * num_rows + row) * num_out
        g = tl.load(gradient + at[:, None] + channel[None, :], mask=is_row[:, None] & is_channel[None, :], other=0.0)
        y = line * line_stride - line_padding + tap // column_taps
        x = column * column_stride - column_padding + tap % column_taps
        is_inside = is_row & (y >= 0) & (y < line_size) & (x >= 0) & (x < column_size)
        at = ((image * line_size + y) * column_size + x) * num_in
        i = tl.load(images + at[:, None] + c[None, :], mask=is_inside[:, None] & is_c[None, :], other=0.0)
        total = tl.dot(tl.trans(g), i, total)
        row += tile.depth
        column += next_column
        is_over = (column >= column_out_size).to(tl.int32)
        column -= is_over * column_out_size
        line += next_line + is_over
        is_over = (line >= line_out_size).to(tl.int32)
        line -= is_over * line_out_size
        image += next_image + is_over
    table += (part * tl.num_programs(2) + shard).to(tl.int64) * num_out * num_taps * num_in
    at = (channel * num_taps + tap) * num_in
    is_there = is_channel[:, None] & is_c[None, :]
    tl.store(table + at[:, None] + c[None, :], total.to(table.dtype.element_ty), mask=is_there)


@triton.jit
def _add_parts(table, out, size, num_parts):
    """The sum of the parts, from the first to the last."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    exists = at < size
    total = tl.zeros([1024], dtype=tl.float32)
    for _ in range(num_parts):
        total += tl.load(table + at, mask=exists, other=0.0)
        table += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=exists)
