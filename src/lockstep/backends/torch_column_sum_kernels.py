"""The sum over the rows of a matrix in Triton, as it is needed for the gradient of every bias."""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.backends.torch_row_kernels import (
    HOW,
    STAGES,
    channels_of,
    load,
    rows_of,
    split_rows,
    table_for,
    table_of,
)


def column_sums(tensor: Tensor, num_columns: int) -> Tensor:
    """The sum over the rows of a tensor that has so many columns next to each other in memory; added in float32."""
    sizes, tile, grid = split_rows(tensor, num_columns)
    table, out = table_for(tensor, sizes), tensor.new_empty(num_columns)
    _parts[grid](tensor, table, sizes, tile, **HOW)
    _total[grid[:1]](table, out, sizes, tile, **HOW)
    return out


@triton.jit
def _parts(data, table, sizes, tile):
    """The sum of this program's rows."""
    channel, exists = channels_of(sizes, tile)
    first, last = rows_of(sizes)
    total = tl.zeros([tile.rows, tile.channels], dtype=tl.float32)
    for start in tl.range(first, last, tile.rows, num_stages=STAGES):
        row = start + tl.arange(0, tile.rows)
        is_there = (row < last)[:, None] & exists[None, :]
        total += load(data, row[:, None].to(tl.int64) * sizes.num_channels + channel[None, :], is_there)
    tl.store(table + tl.program_id(1) * sizes.num_channels + channel, tl.sum(total, 0), mask=exists)


@triton.jit
def _total(table, out, sizes, tile):
    """The sum of all parts."""
    channel, exists = channels_of(sizes, tile)
    tl.store(out + channel, tl.sum(table_of(table, sizes, tile), 0).to(out.dtype.element_ty), mask=exists)
