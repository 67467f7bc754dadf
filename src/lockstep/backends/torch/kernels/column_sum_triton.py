"""The sum over the rows of a matrix in Triton, as it is needed for the gradient of every bias."""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.backends.torch.kernels.rows_triton import (
    HOW,
    STAGES,
    channels_of,
    load,
    of_shard,
    put_in_table,
    rows_of,
    split_rows,
    table_for,
    table_of,
)


def column_sums(tensor: Tensor, num_columns: int, num_shards: int = 1) -> Tensor:
    """For each shard, the sum over its rows of a tensor that has so many columns next to each other in memory.

    Added in float32.
    """
    sizes, tile, grid = split_rows(tensor, num_columns, num_shards)
    out = tensor.new_empty(num_shards, num_columns)
    if sizes.num_parts == 1:  # a table of one row is the sum
        _parts[grid](tensor, out, sizes, tile, **HOW)
        return out
    table = table_for(tensor, sizes, num_shards)
    _parts[grid](tensor, table, sizes, tile, **HOW)
    _total[(grid[0], 1, num_shards)](table, out, sizes, tile, **HOW)
    return out


@triton.jit
def _parts(data, table, sizes, tile):
    """The sum of this program's rows."""
    data = of_shard(data, sizes.num_rows * sizes.num_channels)
    channel, exists = channels_of(sizes, tile)
    first, last = rows_of(sizes)
    total = tl.zeros([tile.rows, tile.channels], dtype=tl.float32)
    for start in tl.range(first, last, tile.rows, num_stages=STAGES):
        row = start + tl.arange(0, tile.rows)
        is_there = (row < last)[:, None] & exists[None, :]
        total += load(data, row[:, None].to(tl.int64) * sizes.num_channels + channel[None, :], is_there)
    put_in_table(table, tl.sum(total, 0), sizes, tile)


@triton.jit
def _total(table, out, sizes, tile):
    """The sum of all parts."""
    channel, exists = channels_of(sizes, tile)
    total = tl.sum(table_of(table, sizes, tile), 0).to(out.dtype.element_ty)
    tl.store(of_shard(out, sizes.num_channels) + channel, total, mask=exists)
