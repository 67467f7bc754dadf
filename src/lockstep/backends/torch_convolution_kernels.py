"""Convolutions of channels-last images as matrix products in Triton, for the images of several shards at once.

    out[pixel, channel] = sum over taps and c of images[pixel moved by the tap, c] * weight[channel, tap, c]

A tap is one (line, column) of the convolution's kernel. Every number of an output, or of a gradient of images, is one
sum in one order, whatever other images are in the launch. The gradient of a weight is a sum over pixels, and each shard
has one of its own: its pixels are cut into parts by its size alone, and the parts are added in their order. So a shard
has the same bits alone and beside others.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """What a kernel is compiled for; constants in it."""

    rows: tl.constexpr
    columns: tl.constexpr
    depth: tl.constexpr  # of the products that are added at a time


class Axis(NamedTuple):
    """Lines, or columns, of images: how many there are before and after, of the kernel; its stride, and the padding."""

    size: Any
    out_size: Any
    num_taps: Any
    stride: Any
    padding: Any


class Launch(NamedTuple):
    """A tile, and how it is computed."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def tile(self) -> Tile:
        return Tile(*map(tl.constexpr, self[:3]))

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Convolution(NamedTuple):
    """How far the kernel moves, and how many zeros are around an image; of lines and columns."""

    stride: tuple[int, int]
    padding: tuple[int, int]

    def axes(self, size: Sequence[int], taps: Sequence[int]) -> tuple[Axis, ...]:
        """Lines and columns, for images of this size and a kernel of so many taps."""
        found = zip(size, taps, self.stride, self.padding, strict=True)
        return tuple(Axis(n, (n + 2 * zeros - t) // step + 1, t, step, zeros) for n, t, step, zeros in found)


def convolution_forward(
    images: Tensor, weight: Tensor, bias: Tensor | None, how: Convolution, launch: Launch
) -> Tensor:
    """The output for all images; all of them, and the weight, are channels-last."""
    axes = how.axes(images.shape[2:], weight.shape[2:])
    out = _empty(images, (len(images), len(weight), *(axis.out_size for axis in axes)))
    num_rows, channels = out.numel() // out.shape[1], (images.shape[1], out.shape[1])
    grid = (triton.cdiv(num_rows, launch.rows) * triton.cdiv(channels[1], launch.columns),)
    _forward[grid](images, weight, bias, out, num_rows, axes, channels, launch.tile, **launch.options)
    return out


def gradient_of_images(
    gradient: Tensor, weight: Tensor, size: Sequence[int], how: Convolution, launch: Launch
) -> Tensor:
    """That of the images, whose height and width are `size`."""
    axes = how.axes(size, weight.shape[2:])
    out = _empty(gradient, (len(gradient), weight.shape[1], *size))
    turned = weight.permute(1, 2, 3, 0).contiguous()  # its outputs are inputs here
    num_rows = len(out) * math.prod(triton.cdiv(axis.size, axis.stride) for axis in axes)  # at most, of each start
    channels = gradient.shape[1], out.shape[1]
    grid = triton.cdiv(num_rows, launch.rows) * triton.cdiv(channels[1], launch.columns), math.prod(how.stride)
    _backward[grid](gradient, turned, out, len(out), axes, channels, launch.tile, **launch.options)
    return out


def gradient_of_weight(
    images: Tensor, gradient: Tensor, weight: Tensor, num_shards: int, how: Convolution, launch: Launch, parts: int
) -> Tensor:
    """That of the weight, for each of `num_shards` shards that the images are those of: one after the other."""
    rows = gradient.numel() // gradient.shape[1] // num_shards
    rows_of_part = triton.cdiv(triton.cdiv(rows, parts), launch.depth) * launch.depth
    parts = triton.cdiv(rows, rows_of_part)
    channels, taps = (images.shape[1], len(weight)), weight.shape[2:]
    shape = num_shards, len(weight), *taps, channels[0]
    out = weight.new_empty(shape)
    table = out if parts == 1 else out.new_empty((parts, *shape), dtype=torch.float32)
    tiles = triton.cdiv(channels[1], launch.rows) * math.prod(taps) * triton.cdiv(channels[0], launch.columns)
    axes = how.axes(images.shape[2:], taps)
    _weight_parts[(tiles, parts, num_shards)](
        images, gradient, table, (rows, rows_of_part), axes, channels, launch.tile, **launch.options
    )
    if parts > 1:
        _add_parts[(triton.cdiv(out.numel(), 1024),)](table, out, out.numel(), parts, num_warps=4)
    return out.permute(0, 1, 4, 2, 3)


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


@triton.jit
def _forward(images, weight, bias, out, num_rows, axes, channels, tile):
    """One tile of the output: all taps, and all channels of each, in their order."""
    lines, columns = axes
    num_in, num_out = channels
    row, channel, is_there = _place(num_rows, num_out, tile)
    column, line = row % columns.out_size, row // columns.out_size % lines.out_size
    image = row // columns.out_size // lines.out_size
    total = _sum(
        (images, weight),
        (image * lines.size, line * lines.stride - lines.padding, column * columns.stride - columns.padding),
        (lines.size, columns.size, num_in),
        (0, 1, 1, lines.num_taps, 0, 1, 1, columns.num_taps, columns.num_taps),
        (channel * (lines.num_taps * columns.num_taps), is_there, channel < num_out),
        tile,
    )
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < num_out, other=0.0).to(tl.float32)[None, :]
    at = row * num_out
    is_there = is_there[:, None] & (channel < num_out)[None, :]
    tl.store(out + at[:, None] + channel[None, :], total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _backward(gradient, weight, out, num_images, axes, channels, tile):
    """One tile of the gradient of images. With a stride, lines and columns that use the same taps go together."""
    lines, columns = axes
    num_in, num_out = channels
    tap_line, tap_column = tl.program_id(1) // columns.stride, tl.program_id(1) % columns.stride
    start_line, first_line, num_lines = _same_taps(lines, tap_line)
    start_column, first_column, num_columns = _same_taps(columns, tap_column)
    num_rows = num_images * num_lines * num_columns
    row, channel, is_there = _place(num_rows, num_out, tile)
    if tl.program_id(0) // tl.cdiv(num_out, tile.columns) * tile.rows >= num_rows:
        return
    column, line, image = row % num_columns, row // num_columns % num_lines, row // num_columns // num_lines
    num_taps = tl.cdiv(lines.num_taps - tap_line, lines.stride), tl.cdiv(columns.num_taps - tap_column, columns.stride)
    total = _sum(
        (gradient, weight),
        (image * lines.out_size, line + start_line, column + start_column),
        (lines.out_size, columns.out_size, num_in),
        (tap_line, lines.stride, -1, num_taps[0], tap_column, columns.stride, -1, num_taps[1], columns.num_taps),
        (channel * (lines.num_taps * columns.num_taps), is_there, channel < num_out),
        tile,
    )
    at = row
    if lines.stride * columns.stride > 1:
        y, x = line * lines.stride + first_line, column * columns.stride + first_column
        at = (image * lines.size + y) * columns.size + x
    at *= num_out
    is_there = is_there[:, None] & (channel < num_out)[None, :]
    tl.store(out + at[:, None] + channel[None, :], total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _same_taps(axis, tap):
    """Of the lines whose gradient uses `tap`, tap + stride, ...: the first that `tap` reads, the first, how many."""
    start = tl.cdiv(tl.maximum(axis.padding - tap, 0), axis.stride)
    first = start * axis.stride + tap - axis.padding
    return start, first, tl.cdiv(tl.maximum(axis.size - first, 0), axis.stride)


@triton.jit
def _place(num_rows, num_channels, tile):
    """The rows and channels of this program's tile, and which of the rows exist."""
    num_tiles = tl.cdiv(num_channels, tile.columns)
    row = tl.program_id(0) // num_tiles * tile.rows + tl.arange(0, tile.rows)
    channel = tl.program_id(0) % num_tiles * tile.columns + tl.arange(0, tile.columns)
    return row, channel, row < num_rows


@triton.jit
def _sum(pointers, place, sizes, taps, of_weight, tile):
    """The sum over taps and channels, for rows that read at `place`: number of the first line, line, column."""
    images, weight = pointers
    image, first_line, first_column = place
    height, width, num_channels = sizes
    line_tap, line_step, line_move, num_lines, column_tap, column_step, column_move, num_columns, weight_width = taps
    channel, is_row, is_channel = of_weight
    depth = tl.arange(0, tile.depth)
    total = tl.zeros([tile.rows, tile.columns], dtype=tl.float32)
    line, column, start = 0, 0, 0
    for _ in range(num_lines * num_columns * (num_channels // tile.depth)):
        y, x = first_line + line * line_move, first_column + column * column_move
        is_inside = is_row & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        at = ((image + y) * width + x) * num_channels + start
        a = tl.load(images + at[:, None] + depth[None, :], mask=is_inside[:, None], other=0.0)
        tap = (line_tap + line * line_step) * weight_width + column_tap + column * column_step
        at = (channel + tap) * num_channels + start
        b = tl.load(weight + at[None, :] + depth[:, None], mask=is_channel[None, :], other=0.0)
        total = tl.dot(a, b, total)
        start += tile.depth
        is_next = start >= num_channels
        start = tl.where(is_next, 0, start)
        column += is_next.to(tl.int32)
        is_next = column >= num_columns
        column = tl.where(is_next, 0, column)
        line += is_next.to(tl.int32)
    return total


@triton.jit
def _weight_parts(images, gradient, table, rows, axes, channels, tile):
    """One tile of a weight's gradient, for one tap: the sum over the pixels of one part of one shard."""
    num_rows, rows_of_part = rows
    lines, columns = axes
    num_in, num_out = channels
    num_tiles, num_taps = tl.cdiv(num_in, tile.columns), lines.num_taps * columns.num_taps
    part, shard = tl.program_id(1), tl.program_id(2)
    tap = tl.program_id(0) // num_tiles % num_taps
    c = tl.program_id(0) % num_tiles * tile.columns + tl.arange(0, tile.columns)
    channel = tl.program_id(0) // num_tiles // num_taps * tile.rows + tl.arange(0, tile.rows)
    is_c, is_channel = c < num_in, channel < num_out
    first = part * rows_of_part
    last = tl.minimum(first + rows_of_part, num_rows)
    row = first + tl.arange(0, tile.depth)
    column, line = row % columns.out_size, row // columns.out_size % lines.out_size
    num_pixels = columns.out_size * lines.out_size
    image = row // num_pixels + shard * (num_rows // num_pixels)
    # how far the next rows are
    next_column, next_line = tile.depth % columns.out_size, tile.depth // columns.out_size % lines.out_size
    next_image = tile.depth // num_pixels
    total = tl.zeros([tile.rows, tile.columns], dtype=tl.float32)
    for _ in range(0, tl.cdiv(last - first, tile.depth)):
        is_row = row < last
        at = (shard * num_rows + row) * num_out
        g = tl.load(gradient + at[:, None] + channel[None, :], mask=is_row[:, None] & is_channel[None, :], other=0.0)
        y = line * lines.stride - lines.padding + tap // columns.num_taps
        x = column * columns.stride - columns.padding + tap % columns.num_taps
        is_inside = is_row & (y >= 0) & (y < lines.size) & (x >= 0) & (x < columns.size)
        at = ((image * lines.size + y) * columns.size + x) * num_in
        i = tl.load(images + at[:, None] + c[None, :], mask=is_inside[:, None] & is_c[None, :], other=0.0)
        total = tl.dot(tl.trans(g), i, total)
        row += tile.depth
        column += next_column
        is_over = (column >= columns.out_size).to(tl.int32)
        column -= is_over * columns.out_size
        line += next_line + is_over
        is_over = (line >= lines.out_size).to(tl.int32)
        line -= is_over * lines.out_size
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
