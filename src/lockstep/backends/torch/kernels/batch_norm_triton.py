"""Batch norm of channels-last images in Triton: two passes over memory forward, and two backward.

The rows are the pixels of all images of a shard; several shards can be normalized in one launch.
"""

from typing import Any, NamedTuple

import torch
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
    rows_of_all,
    split_rows,
    table_for,
    table_of,
)


class Stats(NamedTuple):
    """A layer's running statistics, both None where it has none; how they are updated, and the layer's eps.

    `stride` is the distance in memory between those of two shards.
    """

    mean: Any
    var: Any
    stride: Any
    momentum: Any
    eps: Any


def batch_norm_forward(
    images: Tensor, weight: Tensor, bias: Tensor, stats: Stats, num_shards: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and for each shard and channel the mean and 1 / standard deviation.

    Running statistics are updated in place.
    """
    sizes, tile, grid = split_rows(images, images.shape[1], num_shards)
    means, squares = table_for(images, sizes, num_shards), table_for(images, sizes, num_shards)
    _moments[grid](images, (means, squares), sizes, tile, **HOW)
    out, found = torch.empty_like(images), [torch.empty_like(means[:, 0]) for _ in range(2)]
    pointers = images, out, weight, bias
    _normalize[grid](pointers, (means, squares), tuple(found), stats, sizes, tile, **HOW)
    return out, found[0], found[1]


def batch_norm_backward(
    gradient: Tensor, images: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of images, and those of weight and bias for each shard that `mean` and `inverse` are of."""
    num_shards = len(mean)
    sizes, tile, grid = split_rows(images, images.shape[1], num_shards)
    table = table_for(images, sizes, num_shards), table_for(images, sizes, num_shards)
    _sums[grid]((gradient, images), mean, table, sizes, tile, **HOW)
    d_images, d_weight, d_bias = (torch.empty_like(like) for like in (images, mean, mean))
    pointers = gradient, images, d_images
    per_channel = weight, mean, inverse, d_weight, d_bias
    _gradients[grid](pointers, per_channel, table, sizes, tile, **HOW)
    return d_images, d_weight, d_bias


@triton.jit
def _moments(images, table, sizes, tile):
    """The mean of this program's rows, and the sum of squared differences from it."""
    means, squares = table
    images = of_shard(images, sizes.num_rows * sizes.num_channels)
    channel, exists = channels_of(sizes, tile)
    first, last = rows_of(sizes)
    # differences from a row, so that nothing is lost where the mean is large
    origin = load(images, first.to(tl.int64) * sizes.num_channels + channel, exists)
    total = tl.zeros([tile.rows, tile.channels], dtype=tl.float32)
    square = tl.zeros([tile.rows, tile.channels], dtype=tl.float32)
    for start in tl.range(first, last, tile.rows, num_stages=STAGES):
        row = start + tl.arange(0, tile.rows)
        is_there = (row < last)[:, None] & exists[None, :]
        x = load(images, row[:, None].to(tl.int64) * sizes.num_channels + channel[None, :], is_there)
        x = tl.where(is_there, x - origin[None, :], 0.0)
        total += x
        square += x * x
    shift = tl.sum(total, 0) / (last - first)
    put_in_table(means, origin + shift, sizes, tile)
    put_in_table(squares, tl.maximum(tl.sum(square, 0) - shift * shift * (last - first), 0.0), sizes, tile)


@triton.jit
def _normalize(pointers, table, found, stats, sizes, tile):
    """The output of this program's rows; those of the first rows write what is known about the channels, too."""
    images, out, weight, bias = pointers
    images = of_shard(images, sizes.num_rows * sizes.num_channels)
    out = of_shard(out, sizes.num_rows * sizes.num_channels)
    means, squares = table
    channel, exists = channels_of(sizes, tile)
    of_parts, num_rows = table_of(means, sizes, tile), rows_of_all(sizes, tile)[:, None]
    mean = tl.sum(of_parts * num_rows, 0) / sizes.num_rows
    away = of_parts - mean[None, :]
    square = tl.sum(table_of(squares, sizes, tile) + away * away * num_rows, 0)
    inverse = 1.0 / tl.sqrt_rn(square / sizes.num_rows + stats.eps)
    if tl.program_id(1) == 0:
        tl.store(of_shard(found[0], sizes.num_channels) + channel, mean, mask=exists)
        tl.store(of_shard(found[1], sizes.num_channels) + channel, inverse, mask=exists)
        if stats.mean is not None:
            keep = 1.0 - stats.momentum
            unbiased = square / (sizes.num_rows - 1)
            running_mean, running_var = of_shard(stats.mean, stats.stride), of_shard(stats.var, stats.stride)
            old_mean, old_var = load(running_mean, channel, exists), load(running_var, channel, exists)
            tl.store(running_mean + channel, keep * old_mean + stats.momentum * mean, mask=exists)
            tl.store(running_var + channel, keep * old_var + stats.momentum * unbiased, mask=exists)
    factor = inverse * load(weight, channel, exists)
    offset = load(bias, channel, exists)
    first, last = rows_of(sizes)
    for start in tl.range(first, last, tile.rows, num_stages=STAGES):
        row = start + tl.arange(0, tile.rows)
        is_there = (row < last)[:, None] & exists[None, :]
        at = row[:, None].to(tl.int64) * sizes.num_channels + channel[None, :]
        y = (load(images, at, is_there) - mean[None, :]) * factor[None, :] + offset[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _sums(pointers, mean, table, sizes, tile):
    """Of this program's rows: the sum of the gradients, and of the gradients times the images less their mean."""
    gradient, images = pointers
    gradient = of_shard(gradient, sizes.num_rows * sizes.num_channels)
    images = of_shard(images, sizes.num_rows * sizes.num_channels)
    channel, exists = channels_of(sizes, tile)
    center = load(of_shard(mean, sizes.num_channels), channel, exists)
    first, last = rows_of(sizes)
    total = tl.zeros([tile.rows, tile.channels], dtype=tl.float32)
    product = tl.zeros([tile.rows, tile.channels], dtype=tl.float32)
    for start in tl.range(first, last, tile.rows, num_stages=STAGES):
        row = start + tl.arange(0, tile.rows)
        is_there = (row < last)[:, None] & exists[None, :]
        at = row[:, None].to(tl.int64) * sizes.num_channels + channel[None, :]
        g, x = load(gradient, at, is_there), load(images, at, is_there)
        total += g
        product += g * (x - center[None, :])
    put_in_table(table[0], tl.sum(total, 0), sizes, tile)
    put_in_table(table[1], tl.sum(product, 0), sizes, tile)


@triton.jit
def _gradients(pointers, per_channel, table, sizes, tile):
    """The gradients of this program's rows; those of the first rows write the gradients of weight and bias, too."""
    gradient, images, d_images = pointers
    gradient = of_shard(gradient, sizes.num_rows * sizes.num_channels)
    images = of_shard(images, sizes.num_rows * sizes.num_channels)
    d_images = of_shard(d_images, sizes.num_rows * sizes.num_channels)
    weight, mean, inverse, d_weight, d_bias = per_channel
    channel, exists = channels_of(sizes, tile)
    center = load(of_shard(mean, sizes.num_channels), channel, exists)
    scale = load(of_shard(inverse, sizes.num_channels), channel, exists)
    total = tl.sum(table_of(table[0], sizes, tile), 0)
    product = tl.sum(table_of(table[1], sizes, tile), 0)
    if tl.program_id(1) == 0:
        tl.store(of_shard(d_weight, sizes.num_channels) + channel, product * scale, mask=exists)
        tl.store(of_shard(d_bias, sizes.num_channels) + channel, total, mask=exists)
    factor = scale * load(weight, channel, exists)
    average, slope = total / sizes.num_rows, product / sizes.num_rows * scale * scale
    first, last = rows_of(sizes)
    for start in tl.range(first, last, tile.rows, num_stages=STAGES):
        row = start + tl.arange(0, tile.rows)
        is_there = (row < last)[:, None] & exists[None, :]
        at = row[:, None].to(tl.int64) * sizes.num_channels + channel[None, :]
        g, x = load(gradient, at, is_there), load(images, at, is_there)
        g = (g - average[None, :] - (x - center[None, :]) * slope[None, :]) * factor[None, :]
        tl.store(d_images + at, g.to(d_images.dtype.element_ty), mask=is_there)
