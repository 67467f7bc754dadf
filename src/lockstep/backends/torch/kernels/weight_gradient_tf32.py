"""The gradient of a convolution's weight in TensorFloat-32, as a CUDA kernel for the images of several shards at once.

    gradient[channel, tap, c] = sum over pixels of gradient_of_output[pixel, channel] * images[pixel moved by tap, c]

Both factors have their channels next to each other in memory, and the sum goes over pixels. The fastest matrix
instructions of Hopper GPUs want it the other way round for numbers of 32 bits, and Triton has no choice but to turn
every tile; those that were there before them (`mma.sync`) take either.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch.kernels.nvrtc import (
    can_compile_kernels,
    compile_kernel,
    current_gpu,
    launch,
    raise_if_out_of_memory,
)

COLUMNS, DEPTH, STAGES, PADDING = 128, 32, 3, 8  # of a tile: (tap, c), pixels; tiles on their way; so that banks differ
NUM_THREADS = 128
MIN_TILES = 72  # of a shard: with fewer, its pixels are cut into parts

_SOURCE = r"""
#define ROWS %(rows)d
#define COLUMNS %(columns)d
#define DEPTH %(depth)d
#define STAGES %(stages)d
#define WIDE_ROWS (ROWS + %(padding)d)
#define WIDE_COLUMNS (COLUMNS + %(padding)d)
#define STAGE (DEPTH * (WIDE_ROWS + WIDE_COLUMNS))
#define M (ROWS / 32)  // products of 16 x 8 of a warp: four warps have a quarter of the tile each
#define N (COLUMNS / 16)

__device__ void copy(float* to, const float* from, bool exists) {
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    int bytes = exists ? 16 : 0;  // the rest of 16 is filled with zeros
    asm volatile("cp.async.cg.shared.global [%%0], [%%1], 16, %%2;" ::"r"(address), "l"(from), "r"(bytes));
}

__device__ void multiply(float* total, const unsigned* a, const unsigned* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%%0, %%1, %%2, %%3}, {%%4, %%5, %%6, %%7}, {%%8, %%9}, "
        "{%%0, %%1, %%2, %%3};"
        : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// a number below 2^31 divided by another: the product with 2^(31 + shift) / divisor, rounded up
__device__ int divided(int number, unsigned factor, int shift) {
    return __umulhi(2u * (unsigned)number, factor) >> shift;
}

extern "C" __global__ void __launch_bounds__(128) parts(
    const float* images, const float* gradient, float* table, int num_out, int num_in, int num_rows, int rows_of_part,
    int height, int width, int out_height, int out_width, int taps_wide, int num_taps, int line_stride,
    int column_stride, int line_padding, int column_padding, int image_factor, int image_shift, int line_factor,
    int line_shift) {
    extern __shared__ float memory[];
    const int num_columns = num_taps * num_in, num_tiles = (num_columns + COLUMNS - 1) / COLUMNS;
    const int first_column = blockIdx.x %% num_tiles * COLUMNS, first_channel = blockIdx.x / num_tiles * ROWS;
    const int part = blockIdx.y, shard = blockIdx.z;
    const int begin = part * rows_of_part, end = min(begin + rows_of_part, num_rows);
    const int num_steps = (end - begin + DEPTH - 1) / DEPTH;
    const int images_before = shard * (num_rows / (out_height * out_width));

    // what this thread copies: four numbers of a column's tap, in some rows
    const int chunk = threadIdx.x %% (COLUMNS / 4), column = first_column + 4 * chunk;
    const int tap = column / num_in, tap_line = tap / taps_wide - line_padding;
    const int tap_column = tap %% taps_wide - column_padding;
    const int offset = column - tap * num_in;
    const bool is_column = column < num_columns;

    auto load = [&](int step) {
        float* stage = memory + step %% STAGES * STAGE;
        #pragma unroll
        for (int i = 0; i < DEPTH * ROWS / 4 / 128; i++) {
            int at = threadIdx.x + 128 * i, depth = at / (ROWS / 4), channel = at %% (ROWS / 4) * 4;
            int row = begin + step * DEPTH + depth;
            bool exists = row < end && first_channel + channel < num_out;
            const float* from = gradient + (exists ? (shard * num_rows + row) * num_out + first_channel + channel : 0);
            copy(stage + depth * WIDE_ROWS + channel, from, exists);
        }
        stage += DEPTH * WIDE_ROWS;
        #pragma unroll
        for (int i = 0; i < DEPTH * COLUMNS / 4 / 128; i++) {
            int depth = threadIdx.x / (COLUMNS / 4) + 128 / (COLUMNS / 4) * i;
            int row = begin + step * DEPTH + depth;
            int image = divided(row, (unsigned)image_factor, image_shift);
            int in_image = row - image * out_height * out_width;
            int line = divided(in_image, (unsigned)line_factor, line_shift);
            int y = line * line_stride + tap_line, x = (in_image - line * out_width) * column_stride + tap_column;
            bool exists = row < end && is_column && (unsigned)y < (unsigned)height && (unsigned)x < (unsigned)width;
            int at = (((images_before + image) * height + y) * width + x) * num_in + offset;
            copy(stage + depth * WIDE_COLUMNS + 4 * chunk, images + (exists ? at : 0), exists);
        }
    };

    const int warp = threadIdx.x / 32, lane = threadIdx.x %% 32, group = lane / 4, member = lane %% 4;
    const int own_row = warp %% 2 * (ROWS / 2) + group, own_column = warp / 2 * (COLUMNS / 2) + group;
    float total[M][N][4] = {};
    #pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < num_steps) load(step);
        asm volatile("cp.async.commit_group;");
    }
    for (int step = 0; step < num_steps; step++) {
        asm volatile("cp.async.wait_group %%0;" ::"n"(STAGES - 2));
        __syncthreads();
        if (step + STAGES - 1 < num_steps) load(step + STAGES - 1);
        asm volatile("cp.async.commit_group;");
        const float* left = memory + step %% STAGES * STAGE;
        const float* right = left + DEPTH * WIDE_ROWS;
        #pragma unroll
        for (int depth = member; depth < DEPTH; depth += 8) {
            unsigned a[M][4], b[N][2];
            #pragma unroll
            for (int m = 0; m < M; m++) {
                a[m][0] = __float_as_uint(left[depth * WIDE_ROWS + own_row + 16 * m]);
                a[m][1] = __float_as_uint(left[depth * WIDE_ROWS + own_row + 16 * m + 8]);
                a[m][2] = __float_as_uint(left[(depth + 4) * WIDE_ROWS + own_row + 16 * m]);
                a[m][3] = __float_as_uint(left[(depth + 4) * WIDE_ROWS + own_row + 16 * m + 8]);
            }
            #pragma unroll
            for (int n = 0; n < N; n++) {
                b[n][0] = __float_as_uint(right[depth * WIDE_COLUMNS + own_column + 8 * n]);
                b[n][1] = __float_as_uint(right[(depth + 4) * WIDE_COLUMNS + own_column + 8 * n]);
            }
            #pragma unroll
            for (int m = 0; m < M; m++)
                #pragma unroll
                for (int n = 0; n < N; n++) multiply(total[m][n], a[m], b[n]);
        }
    }
    table += ((long long)part * gridDim.z + shard) * num_out * num_columns;
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int n = 0; n < N; n++)
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                int channel = first_channel + own_row + 16 * m + 8 * half;
                int at = first_column + own_column - group + 8 * n + 2 * member;
                if (channel < num_out && at < num_columns)
                    *(float2*)(table + channel * num_columns + at) = {total[m][n][2 * half], total[m][n][2 * half + 1]};
            }
}
"""


def weight_gradient(
    images: Tensor, gradient: Tensor, shape: tuple[int, ...], how: tuple[tuple[int, int], ...], num_shards: int
) -> Tensor:
    """For each shard the gradient of a weight of this shape: (shards, channels, lines, columns, c).

    Images and gradient are channels-last; `how` is the stride and the padding, of lines and columns.
    """
    from lockstep.backends.torch.kernels.weight_gradient_triton import add_parts

    num_out, num_in, *taps = shape
    tile_rows = 64 if num_out <= 64 else 128
    num_rows, num_columns = gradient.numel() // num_out // num_shards, num_in * taps[0] * taps[1]
    num_tiles = -(-num_out // tile_rows) * -(-num_columns // COLUMNS)
    rows_of_part = math.ceil(num_rows / (max(1, MIN_TILES // num_tiles) * DEPTH)) * DEPTH
    parts = -(-num_rows // rows_of_part)
    table = images.new_empty(parts, num_shards, num_out, *taps, num_in)
    sizes = *images.shape[2:], *gradient.shape[2:]
    numbers = num_out, num_in, num_rows, rows_of_part, *sizes, taps[1], taps[0] * taps[1], *how[0], *how[1]
    divisions = *_division(sizes[2] * sizes[3]), *_division(sizes[3])
    kernel, grid = _kernel(tile_rows, images.device), (num_tiles, parts, num_shards)
    launch(kernel, grid, [images, gradient, table, *numbers, *divisions], NUM_THREADS, _shared_bytes(tile_rows))
    return add_parts(table, images.dtype)


def _division(divisor: int) -> tuple[int, int]:
    """A factor and a shift: multiplied by the one and shifted by the other, a number below 2**31 is divided."""
    shift = (divisor - 1).bit_length()
    factor = -(-(1 << (31 + shift)) // divisor)
    return factor - (factor >> 31 << 32), shift  # in 32 bits, read without a sign


@cache
def can_multiply() -> bool:
    """Whether the kernel can be compiled and given its memory."""
    try:
        return can_compile_kernels() and _kernel(128, current_gpu()) is not None
    except Exception as problem:  # of private functions that may change
        raise_if_out_of_memory(problem)
        return False


@cache
def _kernel(tile_rows: int, device: torch.device) -> Any:
    sizes = {"columns": COLUMNS, "depth": DEPTH, "stages": STAGES, "padding": PADDING}
    kernel = compile_kernel(_SOURCE % {"rows": tile_rows, **sizes}, "parts", device)
    with torch.cuda.device(device):
        kernel.set_shared_memory_config(_shared_bytes(tile_rows))
    return kernel


def _shared_bytes(tile_rows: int) -> int:
    return 4 * STAGES * DEPTH * (tile_rows + COLUMNS + 2 * PADDING)
