"""What kernels over rows and channels have in common, in Triton: who goes through which rows, and sums over all rows.

A program goes through some rows of a few channels. What it adds up is one row of a table; whoever needs the sum over
all rows goes through that table from top to bottom. So the order of every sum is that of the code, and depends on the
shape alone. The rows may be those of several shards: each has a table of its own, and the bits that it has alone.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS, ROWS = 64, 64  # of a tile, which a program reads at a time
HOW = {"num_warps": 4}
BYTES = 1 << 16  # that a program should read, so that there are enough of them
STAGES = tl.constexpr(4)  # tiles that are on their way at the same time
TABLE_ROWS = 32, 128  # of a table: programs that share the rows. All that need the sum read the whole table


class Sizes(NamedTuple):
    """What the programs of a launch have in common."""

    num_rows: Any  # of one shard
    num_channels: Any
    rows_of_program: Any
    num_parts: Any


class Tile(NamedTuple):
    """What a kernel is compiled for; constants in it."""

    rows: tl.constexpr
    channels: tl.constexpr
    table_rows: tl.constexpr


def split_rows(tensor: Tensor, num_channels: int, num_shards: int = 1) -> tuple[Sizes, Tile, tuple[int, int, int]]:
    """How programs share the rows of a tensor with so many channels, and the grid of programs."""
    num_rows, columns = tensor.numel() // num_channels // num_shards, triton.cdiv(num_channels, CHANNELS)
    num_bytes = tensor.nbytes // num_shards
    parts = min(triton.cdiv(triton.cdiv(num_bytes, BYTES), columns), triton.cdiv(num_rows, ROWS), TABLE_ROWS[-1])
    rows_of_program = triton.cdiv(triton.cdiv(num_rows, parts), ROWS) * ROWS
    parts = triton.cdiv(num_rows, rows_of_program)
    table_rows = next(size for size in TABLE_ROWS if size >= parts)
    tile = Tile(*map(tl.constexpr, (ROWS, CHANNELS, table_rows)))
    return Sizes(num_rows, num_channels, rows_of_program, parts), tile, (columns, parts, num_shards)


def table_for(tensor: Tensor, sizes: Sizes, num_shards: int = 1) -> Tensor:
    """A row for each program that shares the rows of a shard."""
    return tensor.new_empty(num_shards, sizes.num_parts, sizes.num_channels, dtype=torch.float32)


@triton.jit
def of_shard(data, size):
    """What belongs to this program's shard, where each has `size` numbers."""
    return data + tl.program_id(2).to(tl.int64) * size


@triton.jit
def channels_of(sizes, tile):
    """The channels of this program, and which of them exist."""
    channel = tl.program_id(0) * tile.channels + tl.arange(0, tile.channels)
    return channel, channel < sizes.num_channels


@triton.jit
def rows_of(sizes):
    """The rows of this program: the first, and the one after the last."""
    first = tl.program_id(1) * sizes.rows_of_program
    return first, tl.minimum(first + sizes.rows_of_program, sizes.num_rows)


@triton.jit
def load(data, at, is_there):
    """Numbers as float32; zero where there are none."""
    return tl.load(data + at, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def put_in_table(table, values, sizes, tile):
    """Writes this program's row."""
    channel, exists = channels_of(sizes, tile)
    at = tl.program_id(1) * sizes.num_channels + channel
    values = values.to(table.dtype.element_ty)
    tl.store(of_shard(table, sizes.num_parts * sizes.num_channels) + at, values, mask=exists)


@triton.jit
def table_of(data, sizes, tile):
    """What all programs have found about this program's channels; zeros behind the last of them."""
    channel, exists = channels_of(sizes, tile)
    part = tl.arange(0, tile.table_rows)
    is_there = (part < sizes.num_parts)[:, None] & exists[None, :]
    data = of_shard(data, sizes.num_parts * sizes.num_channels)
    return load(data, part[:, None] * sizes.num_channels + channel[None, :], is_there)


@triton.jit
def rows_of_all(sizes, tile):
    """How many rows each program has gone through."""
    left = sizes.num_rows - tl.arange(0, tile.table_rows) * sizes.rows_of_program
    return tl.minimum(tl.maximum(left, 0), sizes.rows_of_program).to(tl.float32)
