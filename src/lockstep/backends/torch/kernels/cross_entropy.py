"""Cross-entropy on a GPU in one pass forward and one backward, for many classes.

PyTorch makes a tensor of log-probabilities and one of its gradient, and in bf16 rounds them. Here scores are read as
they are, numbers inside are float32, and what is written is one number for each row and the gradient of the scores.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch.kernels.nvrtc import NUM_THREADS, can_compile_kernels, compile_kernel, launch
from lockstep.backends.torch.stacked import per_shard

MIN_CLASSES = 512  # for fewer, PyTorch's kernels are as fast

_SOURCE = """
__device__ float number(float x) { return x; }
__device__ float number(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }  // of bfloat16
__device__ void put(float* where, float x) { *where = x; }
__device__ void put(unsigned short* where, float x) {  // to the nearest bfloat16, to even
    unsigned int bits = __float_as_uint(x);
    *where = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#define NONE __int_as_float(0xff800000)  // minus infinity
typedef %(type)s T;
const int WIDTH = 16 / sizeof(T);
struct alignas(16) Wide { T x[WIDTH]; };

// the running maximum m, and the sum s of exp(x - m)
__device__ void merge(float& m, float& s, float other_m, float other_s) {
    float top = fmaxf(m, other_m);
    s = (m == top ? s : s * expf(m - top)) + (other_m == top ? other_s : other_s * expf(other_m - top));
    m = top;
}

extern "C" __global__ void forward(const T* scores, const long long* labels, float* losses, float* sums, int classes) {
    const T* row = scores + (long long)blockIdx.x * classes;
    long long label = labels[blockIdx.x];
    float m = NONE, s = 0.0f;
    for (int at = threadIdx.x * WIDTH; at < classes; at += blockDim.x * WIDTH) {
        Wide wide = *(const Wide*)(row + at);
        float top = m;
        #pragma unroll
        for (int i = 0; i < WIDTH; i++) top = fmaxf(top, number(wide.x[i]));
        if (top > m) { s *= expf(m - top); m = top; }
        #pragma unroll
        for (int i = 0; i < WIDTH; i++) s += top == NONE ? 0.0f : expf(number(wide.x[i]) - m);
    }
    __shared__ float ms[%(threads)d], ss[%(threads)d];
    ms[threadIdx.x] = m; ss[threadIdx.x] = s;
    __syncthreads();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if (threadIdx.x < half) {
            m = ms[threadIdx.x]; s = ss[threadIdx.x];
            merge(m, s, ms[threadIdx.x + half], ss[threadIdx.x + half]);
            ms[threadIdx.x] = m; ss[threadIdx.x] = s;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        float sum = ms[0] + logf(ss[0]);
        sums[blockIdx.x] = sum;
        bool counts = label >= 0 && label < classes;
        float otherwise = label == %(ignored)d ? 0.0f : __int_as_float(0x7fc00000);  // not a number
        losses[blockIdx.x] = counts ? sum - number(row[label]) : otherwise;
    }
}

extern "C" __global__ void backward(
    const T* scores, const long long* labels, const float* sums, const float* gradients, T* out, int classes
) {
    const T* row = scores + (long long)blockIdx.x * classes;
    T* written = out + (long long)blockIdx.x * classes;
    long long label = labels[blockIdx.x];
    float sum = sums[blockIdx.x], gradient = label == %(ignored)d ? 0.0f : gradients[blockIdx.x];
    for (int at = threadIdx.x * WIDTH; at < classes; at += blockDim.x * WIDTH) {
        Wide wide = *(const Wide*)(row + at), result;
        #pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            float p = gradient == 0.0f ? 0.0f : expf(number(wide.x[i]) - sum) - (at + i == label ? 1.0f : 0.0f);
            put(&result.x[i], gradient * p);
        }
        *(Wide*)(written + at) = result;
    }
}
"""
_CTYPES = {torch.float32: "float", torch.bfloat16: "unsigned short"}


def can_fuse(scores: Tensor, labels: Tensor) -> bool:
    """Whether `fused_cross_entropy` takes these; it depends on their types and shapes only."""
    width = 16 // scores.element_size()
    return (
        scores.is_cuda
        and scores.dtype in _CTYPES
        and labels.dtype == torch.int64
        and scores.ndim == 2
        and scores.shape[1] >= MIN_CLASSES
        and scores.shape[1] % width == 0
        and scores.is_contiguous()
        and not torch.compiler.is_compiling()
        and can_compile_kernels()
    )


@per_shard
def fused_cross_entropy(scores: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The cross-entropy of each row, in float32; 0 where the label is `ignored`."""
    losses: Tensor = _CrossEntropy.apply(scores, labels.contiguous(), ignored)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, ignored: int) -> Tensor:
        num_rows, num_classes = scores.shape
        losses, sums = (torch.empty(num_rows, dtype=torch.float32, device=scores.device) for _ in range(2))
        kernel = _kernels(scores.dtype, ignored, scores.device)["forward"]
        launch(kernel, num_rows, [scores, labels, losses, sums, num_classes])
        ctx.save_for_backward(scores, labels, sums)
        ctx.ignored = ignored
        return losses

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        scores, labels, sums = ctx.saved_tensors
        (num_rows, num_classes), found = scores.shape, torch.empty_like(scores)
        kernel = _kernels(scores.dtype, ctx.ignored, scores.device)["backward"]
        arguments = [scores, labels, sums, gradients.float().contiguous(), found, num_classes]
        launch(kernel, num_rows, arguments)
        return found, None, None


@cache
def _kernels(dtype: torch.dtype, ignored: int, device: torch.device) -> dict[str, Any]:
    source = _SOURCE % {"type": _CTYPES[dtype], "threads": NUM_THREADS, "ignored": ignored}
    return {name: compile_kernel(source, name, device) for name in ("forward", "backward")}
