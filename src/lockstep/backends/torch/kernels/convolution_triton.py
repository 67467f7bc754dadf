"""Convolutions of channels-last images as matrix products in Triton, for the images of several shards at once.

    out[pixel, channel] = sum over taps and c of images[pixel moved by the tap, c] * weight[channel, tap, c]

A tap is one (line, column) of the convolution's kernel. Every number of an output, or of a gradient of images, is one
sum in one order, whatever other images are in the launch: a shard has the same bits alone and beside others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

POINTS, CLOSE, STRIDED = map(tl.constexpr, range(3))  # kinds: each pixel is multiplied by itself; no stride; with one
BASE = tl.constexpr(4096)  # larger than any number in a packed axis
GENERAL = ["num_rows", "num_images", "lines", "columns"]  # a kernel is not compiled anew for some of their values


class Tile(NamedTuple):
    """What a kernel is compiled for; constants in it."""

    rows: tl.constexpr
    columns: tl.constexpr
    depth: tl.constexpr  # of the products that are added at a time
    kind: tl.constexpr


class Axis(NamedTuple):
    """Lines, or columns, of images: how many there are before and after, of the kernel; its stride, and the padding."""

    size: int
    out_size: int
    num_taps: int
    stride: int
    padding: int

    @property
    def packed(self) -> int:
        """All of them as one integer: kernels are compiled anew for small numbers in a record."""
        found = 0
        for number in self:
            found = found * BASE.value + number
        return found


class Launch(NamedTuple):
    """A tile, and how it is computed."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    parts: int = 1  # that a sum over pixels is cut into

    def tile(self, kind: int = 0) -> Tile:
        return Tile(*map(tl.constexpr, (*self[:3], kind)))

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
        """That of a kernel for it."""
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
    pointers, tile = (images, weight, bias, out), launch.tile(min(how.kind(weight), CLOSE.value))
    _forward[grid](pointers, num_rows, lines.packed, columns.packed, channels, tile, **launch.options)
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
    pointers, tile = (gradient, turned, out), launch.tile(how.kind(weight))
    _backward[grid](pointers, len(out), lines.packed, columns.packed, channels, tile, **launch.options)
    return out


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


@triton.jit(do_not_specialize=GENERAL)
def _forward(pointers, num_rows, lines, columns, channels, tile):
    """One tile of the output: all taps, and all channels of each, in their order."""
    images, weight, bias, out = pointers
    line_size, line_out_size, line_taps, line_stride, line_padding = unpacked(lines)
    column_size, column_out_size, column_taps, column_stride, column_padding = unpacked(columns)
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
        tile,
    )
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < num_out, other=0.0).to(tl.float32)[None, :]
    _store(out, total, row, channel, is_row, num_out)


@triton.jit(do_not_specialize=GENERAL)
def _backward(pointers, num_images, lines, columns, channels, tile):
    """One tile of the gradient of images. With a stride, lines and columns that use the same taps go together."""
    gradient, weight, out = pointers
    line_size, line_out_size, line_taps, line_stride, line_padding = unpacked(lines)
    column_size, column_out_size, column_taps, column_stride, column_padding = unpacked(columns)
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
        tile,
    )
    if tile.kind == STRIDED:
        y, x = line * line_stride + first_line, column * column_stride + first_column
        row = (image * line_size + y) * column_size + x
    _store(out, total, row, channel, is_row, num_out)


@triton.jit
def unpacked(axis):
    """The numbers of an `Axis`."""
    padding, axis = (axis % BASE).to(tl.int32), axis // BASE
    stride, axis = (axis % BASE).to(tl.int32), axis // BASE
    num_taps, axis = (axis % BASE).to(tl.int32), axis // BASE
    out_size, size = (axis % BASE).to(tl.int32), (axis // BASE).to(tl.int32)
    return size, out_size, num_taps, stride, padding


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
def _sum(pointers, place, sizes, taps, of_weight, tile):
    """The sum over taps and channels, for rows that read at `place`: row, the image's first line, line, column."""
    images, weight = pointers
    row, image, first_line, first_column = place
    height, width, num_channels = sizes
    line_tap, line_step, line_move, num_lines, column_tap, column_step, column_move, num_columns, weight_width = taps
    channel, is_row, is_channel = of_weight
    depth = tl.arange(0, tile.depth)
    total = tl.zeros([tile.rows, tile.columns], dtype=tl.float32)
    if tile.kind == POINTS:
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
