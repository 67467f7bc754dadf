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

POINTS, CLOSE, STRIDED = map(tl.constexpr, range(3))
# A kernel is compiled anew for every integer that is 1 or a multiple of 16, in a record, too; not for these.
AXES = [f"{axis}_{name}" for axis in ("line", "column") for name in ("size", "out_size", "taps", "stride", "padding")]
GENERAL = ["num_rows", "num_images", *AXES]


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

    def kind(self, weight: Tensor) -> int:
        """What a kernel is compiled for: POINTS, where each pixel is multiplied by itself; strided, or not."""
        if weight.shape[2] * weight.shape[3] * max(self.stride) == 1 and max(self.padding) == 0:
            return int(POINTS.value)
        return int((STRIDED if max(self.stride) > 1 else CLOSE).value)


def convolution_forward(
    images: Tensor, weight: Tensor, bias: Tensor | None, how: Convolution, launch: Launch
) -> Tensor:
    """The output for all images; all of them, and the weight, are channels-last."""
    lines, columns = how.axes(images.shape[2:], weight.shape[2:])
    out = _empty(images, (len(images), len(weight), lines.out_size, columns.out_size))
    num_rows, channels = out.numel() // out.shape[1], (images.shape[1], out.shape[1])
    grid = (triton.cdiv(num_rows, launch.rows) * triton.cdiv(channels[1], launch.columns),)
    pointers, kind = (images, weight, bias, out), min(how.kind(weight), CLOSE.value)
    _forward[grid](pointers, num_rows, *lines, *columns, channels, kind, launch.tile, **launch.options)
    return out


def gradient_of_images(
    gradient: Tensor, weight: Tensor, size: Sequence[int], how: Convolution, launch: Launch
) -> Tensor:
    """That of the images, whose height and width are `size`."""
    turned = weight.permute(1, 2, 3, 0).contiguous()  # its outputs are inputs here
    if how.kind(weight) == POINTS.value:
        return convolution_forward(gradient, turned.permute(0, 3, 1, 2), None, how, launch)
    lines, columns = how.axes(size, weight.shape[2:])
    out = _empty(gradient, (len(gradient), weight.shape[1], *size))
    num_rows = len(out) * triton.cdiv(lines.size, lines.stride) * triton.cdiv(columns.size, columns.stride)  # at most
    channels = gradient.shape[1], out.shape[1]
    grid = triton.cdiv(num_rows, launch.rows) * triton.cdiv(channels[1], launch.columns), lines.stride * columns.stride
    pointers = gradient, turned, out
    _backward[grid](pointers, len(out), *lines, *columns, channels, how.kind(weight), launch.tile, **launch.options)
    return out


def gradient_of_weight(
    images: Tensor, gradient: Tensor, weight: Tensor, num_shards: int, how: Convolution, launch: Launch, parts: int
) -> Tensor:
    """For each of `num_shards` shards that the images are those of, the gradient of the weight.

    Its shape is (shards, channels, lines, columns, c).
    """
    rows = gradient.numel() // gradient.shape[1] // num_shards
    rows_of_part = triton.cdiv(triton.cdiv(rows, parts), launch.depth) * launch.depth
    parts = triton.cdiv(rows, rows_of_part)
    channels, taps = (images.shape[1], len(weight)), weight.shape[2:]
    dtype = weight.dtype if parts == 1 else torch.float32
    table = weight.new_empty((parts, num_shards, len(weight), *taps, channels[0]), dtype=dtype)
    tiles = triton.cdiv(channels[1], launch.rows) * math.prod(taps) * triton.cdiv(channels[0], launch.columns)
    lines, columns = how.axes(images.shape[2:], taps)
    grid, pointers = (tiles, parts, num_shards), (images, gradient, table)
    _weight_parts[grid](pointers, rows, rows_of_part, *lines, *columns, channels, launch.tile, **launch.options)
    return add_parts(table, weight.dtype)


def add_parts(table: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the parts of a table, from the first to the last."""
    if len(table) == 1:
        return table[0]
    out = torch.empty_like(table[0], dtype=dtype)
    _add_parts[(triton.cdiv(out.numel(), 1024),)](table, out, out.numel(), len(table), num_warps=4)
    return out


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


@triton.jit(do_not_specialize=GENERAL)
def _forward(
    pointers, num_rows,
    line_size, line_out_size, line_taps, line_stride, line_padding,
    column_size, column_out_size, column_taps, column_stride, column_padding,
    channels, kind: tl.constexpr, tile,
):  # fmt: skip
    """One tile of the output: all taps, and all channels of each, in their order."""
    images, weight, bias, out = pointers
    num_in, num_out = channels
    row, channel, is_row = _place(num_rows, num_out, tile)
    column, line = row % column_out_size, row // column_out_size % line_out_size
    image = row // column_out_size // line_out_size
    total = _sum(
        (images, weight),
        (row, image * line_size, line * line_stride - line_padding, column * column_stride - column_padding),
        (line_size, column_size, num_in),
        (0, 1, 1, line_taps, 0, 1, 1, column_taps, column_taps),
        (channel * (line_taps * column_taps), is_row, channel < num_out),
        kind,
        tile,
    )
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < num_out, other=0.0).to(tl.float32)[None, :]
    _store(out, total, row, channel, is_row, num_out)


@triton.jit(do_not_specialize=GENERAL)
def _backward(
    pointers, num_images,
    line_size, line_out_size, line_taps, line_stride, line_padding,
    column_size, column_out_size, column_taps, column_stride, column_padding,
    channels, kind: tl.constexpr, tile,
):  # fmt: skip
    """One tile of the gradient of images. With a stride, lines and columns that use the same taps go together."""
    gradient, weight, out = pointers
    num_in, num_out = channels
    tap_line, tap_column = tl.program_id(1) // column_stride, tl.program_id(1) % column_stride
    start_line, first_line, num_lines = _same_taps(line_size, line_stride, line_padding, tap_line)
    start_column, first_column, num_columns = _same_taps(column_size, column_stride, column_padding, tap_column)
    num_rows = num_images * num_lines * num_columns
    row, channel, is_row = _place(num_rows, num_out, tile)
    if tl.program_id(0) // tl.cdiv(num_out, tile.columns) * tile.rows >= num_rows:
        return
    column, line, image = row % num_columns, row // num_columns % num_lines, row // num_columns // num_lines
    num_taps = tl.cdiv(line_taps - tap_line, line_stride), tl.cdiv(column_taps - tap_column, column_stride)
    total = _sum(
        (gradient, weight),
        (row, image * line_out_size, line + start_line, column + start_column),
        (line_out_size, column_out_size, num_in),
        (tap_line, line_stride, -1, num_taps[0], tap_column, column_stride, -1, num_taps[1], column_taps),
        (channel * (line_taps * column_taps), is_row, channel < num_out),
        kind,
        tile,
    )
    if kind == STRIDED:
        y, x = line * line_stride + first_line, column * column_stride + first_column
        row = (image * line_size + y) * column_size + x
    _store(out, total, row, channel, is_row, num_out)


@triton.jit
def _same_taps(size, stride, padding, tap):
    """Of the lines whose gradient uses `tap`, tap + stride, ...: the first that `tap` reads, the first, how many."""
    start = tl.cdiv(tl.maximum(padding - tap, 0), stride)
    first = start * stride + tap - padding
    return start, first, tl.cdiv(tl.maximum(size - first, 0), stride)


@triton.jit
def _store(out, total, row, channel, is_row, num_channels):
    at = row[:, None] * num_channels + channel[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_row[:, None] & (channel < num_channels)[None, :])


@triton.jit
def _place(num_rows, num_channels, tile):
    """The rows and channels of this program's tile, and which of the rows exist."""
    num_tiles = tl.cdiv(num_channels, tile.columns)
    row = tl.program_id(0) // num_tiles * tile.rows + tl.arange(0, tile.rows)
    channel = tl.program_id(0) % num_tiles * tile.columns + tl.arange(0, tile.columns)
    return row, channel, row < num_rows


@triton.jit
def _sum(pointers, place, sizes, taps, of_weight, kind: tl.constexpr, tile):
    """The sum over taps and channels, for rows that read at `place`: row, the image's first line, line, column."""
    images, weight = pointers
    row, image, first_line, first_column = place
    height, width, num_channels = sizes
    line_tap, line_step, line_move, num_lines, column_tap, column_step, column_move, num_columns, weight_width = taps
    channel, is_row, is_channel = of_weight
    depth = tl.arange(0, tile.depth)
    total = tl.zeros([tile.rows, tile.columns], dtype=tl.float32)
    if kind == POINTS:
        for start in range(0, num_channels, tile.depth):
            at = row[:, None] * num_channels + start + depth[None, :]
            a = tl.load(images + at, mask=is_row[:, None], other=0.0)
            at = channel[None, :] * num_channels + start + depth[:, None]
            b = tl.load(weight + at, mask=is_channel[None, :], other=0.0)
            total = tl.dot(a, b, total)
    else:
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


@triton.jit(do_not_specialize=[*GENERAL, "rows_of_part"])
def _weight_parts(
    pointers, num_rows, rows_of_part,
    line_size, line_out_size, line_taps, line_stride, line_padding,
    column_size, column_out_size, column_taps, column_stride, column_padding,
    channels, tile,
):  # fmt: skip
    """One tile of a weight's gradient, for one tap: the sum over the pixels of one part of one shard."""
    images, gradient, table = pointers
    num_in, num_out = channels
    num_tiles, num_taps = tl.cdiv(num_in, tile.columns), line_taps * column_taps
    part, shard = tl.program_id(1), tl.program_id(2)
    tap = tl.program_id(0) // num_tiles % num_taps
    c = tl.program_id(0) % num_tiles * tile.columns + tl.arange(0, tile.columns)
    channel = tl.program_id(0) // num_tiles // num_taps * tile.rows + tl.arange(0, tile.rows)
    is_c, is_channel = c < num_in, channel < num_out
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
