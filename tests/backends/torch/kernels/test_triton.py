"""Our Triton kernels without a GPU, in Triton's interpreter: what they compute, and that a shard's bits are its own.

`nox -s kernels` runs this with TRITON_INTERPRET=1, which has to be set before Triton is imported. What runs as CUDA or
as assembly is tested on GPUs only.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

if find_spec("triton") is None or "TRITON_INTERPRET" not in os.environ:
    pytest.skip("nox -s kernels runs Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl

from lockstep.backends.torch.kernels import attention_triton, convolution
from lockstep.backends.torch.kernels.attention_triton import Attention, Saved, attention_backward, attention_forward
from lockstep.backends.torch.kernels.batch_norm_triton import Stats, batch_norm_backward, batch_norm_forward
from lockstep.backends.torch.kernels.column_sum_triton import column_sums
from lockstep.backends.torch.kernels.convolution_triton import (
    Convolution,
    Launch,
    convolution_forward,
    gradient_of_images,
)
from lockstep.backends.torch.kernels.layer_norm_triton import layer_norm_backward
from lockstep.backends.torch.kernels.weight_gradient_triton import gradient_of_weight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TYPES_OF_PRODUCTS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # numpy has no bfloat16
NUM_SHARDS = 2


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def assert_near(found, exact, dtype):
    assert found.shape == exact.shape
    assert (found.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm()


def images_last(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).contiguous(memory_format=torch.channels_last)


@TYPES
@pytest.mark.parametrize("shape", [(1, 16), (256, 70), (700, 96), (3000, 130)])
def test_sums_over_rows(shape, dtype):
    rows = torch.randn(NUM_SHARDS, *shape).to(dtype)
    together = column_sums(rows, shape[1], NUM_SHARDS)
    for shard, found in zip(rows, together, strict=True):
        assert found.dtype == dtype
        assert_near(found, shard.double().sum(0), dtype)
        assert torch.equal(found, column_sums(shard, shape[1])[0])


@TYPES
@pytest.mark.parametrize("width", [64, 100])
def test_layer_norm_backward(width, dtype):
    rows, gradient = (torch.randn(330, width).to(dtype) for _ in range(2))
    weight, bias = torch.randn(width), torch.randn(width)
    _, mean, inverse = torch.native_layer_norm(rows.float(), [width], weight, bias, 1e-5)
    exact = [each.double().requires_grad_() for each in (rows, weight, bias)]
    expected = torch.autograd.grad(F.layer_norm(exact[0], [width], *exact[1:]), exact, gradient.double())
    for found, each in zip(layer_norm_backward(gradient, rows, weight, mean, inverse), expected, strict=True):
        assert_near(found, each, dtype)


@TYPES
@pytest.mark.parametrize("shape", [(3, 70, 5, 7), (4, 16, 20, 20)])
def test_batch_norm(shape, dtype):
    channels, momentum, eps = shape[1], 0.1, 1e-5
    weight, bias = torch.randn(channels), torch.randn(channels)
    images, gradient = (images_last(NUM_SHARDS * shape[0], *shape[1:], dtype=dtype) for _ in range(2))

    def computed(images, gradient, num_shards):
        stats = torch.zeros(num_shards, channels), torch.ones(num_shards, channels)
        out, *saved = batch_norm_forward(
            images, weight, bias, Stats(*stats, stats[0].stride(0), momentum, eps), num_shards
        )
        d_images, *d_layer = batch_norm_backward(gradient, images, weight, *saved)
        parts = out.unflatten(0, (num_shards, -1)), d_images.unflatten(0, (num_shards, -1)), *d_layer, *stats
        return [tuple(each[shard] for each in parts) for shard in range(num_shards)]

    together = computed(images, gradient, NUM_SHARDS)
    for X, g, found in zip(images.chunk(NUM_SHARDS), gradient.chunk(NUM_SHARDS), together, strict=True):
        running = torch.zeros(channels).double(), torch.ones(channels).double()
        exact = [each.double().requires_grad_() for each in (X, weight, bias)]
        out = F.batch_norm(exact[0], *running, *exact[1:], True, momentum, eps)
        expected = out.detach(), *torch.autograd.grad(out, exact, g.double()), *running
        for own, each, alone in zip(found, expected, computed(X, g, 1)[0], strict=True):
            assert_near(own, each, dtype)
            assert torch.equal(own, alone)


SHAPES = [  # channels before and after, lines, columns, kernel, stride, padding
    (64, 64, 5, 4, (3, 3), (1, 1), (1, 1)),
    (64, 128, 5, 6, (3, 3), (2, 2), (1, 1)),
    (128, 64, 3, 3, (1, 1), (1, 1), (0, 0)),
    (64, 64, 5, 4, (1, 1), (2, 1), (0, 0)),
    (64, 64, 7, 6, (5, 2), (3, 2), (2, 0)),
]


@TYPES_OF_PRODUCTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions(shape, dtype):
    num_in, num_out, *size, kernel, stride, padding = shape
    how, moves = Convolution(stride, padding), {"stride": stride, "padding": padding}
    images = images_last(NUM_SHARDS * 2, num_in, *size, dtype=dtype)
    weight = 0.1 * images_last(num_out, num_in, *kernel, dtype=dtype)
    bias = torch.randn(num_out).to(dtype)
    gradient = images_last(*F.conv2d(images.float(), weight.float(), **moves).shape, dtype=dtype)
    forward = Launch(*convolution.tile_of_images(weight, num_in, num_out, (1, 1)))
    backward = Launch(*convolution.tile_of_images(weight, num_out, num_in, stride))
    of_weight = Launch(*convolution.tile_of_weight(weight))

    def computed(X, g, num_shards):
        out = convolution_forward(X, weight, bias, how, forward)
        d_images = gradient_of_images(g, weight, X.shape[2:], how, backward)
        d_weight = gradient_of_weight(X, g, weight, num_shards, how, of_weight).permute(0, 1, 4, 2, 3)
        return [*zip(out.chunk(num_shards), d_images.chunk(num_shards), d_weight, strict=True)]

    together = computed(images, gradient, NUM_SHARDS)
    for X, g, found in zip(images.chunk(NUM_SHARDS), gradient.chunk(NUM_SHARDS), together, strict=True):
        exact = [each.double().requires_grad_() for each in (X, weight)]
        out = F.conv2d(*exact, bias.double(), **moves)
        expected = out.detach(), *torch.autograd.grad(out, exact, g.double())
        for own, each in zip(found, expected, strict=True):
            assert_near(own, each, dtype)
        d_weight = computed(X, g, 1)[0][2]
        assert torch.equal(found[2], d_weight)  # others are products of matrices with more rows, which are numpy's here


@triton.jit
def drop_by_product(numbers, of_rows, of_columns, dropout):
    """What the assembly does, which the interpreter does not know."""
    product = of_rows[:, None].to(tl.uint32) * of_columns[None, :].to(tl.uint32)
    return tl.where(product >= tl.full([1, 1], dropout.below, tl.uint32), numbers, 0.0)


@pytest.mark.filterwarnings("ignore:overflow")  # of products that are taken modulo 2**32
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("length", "width", "is_causal"), [(70, 32, False), (130, 64, True), (128, 32, True), (1, 64, True)]
)
def test_attention(length, width, is_causal, dropout, monkeypatch):
    monkeypatch.setattr(attention_triton, "drop", drop_by_product)
    samples, heads = 1, 2
    joined = torch.randn(samples, length, 3, heads, width).to(torch.float16)
    inputs = tuple(joined.permute(2, 0, 3, 1, 4))
    gradient = torch.randn(samples, length, heads, width).to(torch.float16).transpose(1, 2)
    how = Attention(is_causal, width**-0.5, dropout, torch.randint(2**62, (2,)))
    is_kept = torch.cat(
        [attention_forward((*inputs[:2], part.expand_as(inputs[2])), how)[0] != 0 for part in columns(length, width)], 3
    )[..., :length]
    if not dropout:
        assert is_kept.sum() == samples * heads * (length * (length + 1) // 2 if is_causal else length**2)

    exact = [each.double().requires_grad_() for each in inputs]
    scores = exact[0] @ exact[1].transpose(2, 3) * width**-0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    expected = (scores.softmax(3) * is_kept / (1 - dropout)) @ exact[2]
    expected_gradients = torch.autograd.grad(expected, exact, gradient.double())

    out, logsumexp = attention_forward(inputs, how)
    gradients = attention_backward(gradient, Saved(inputs, out, logsumexp), how)
    assert_near(out, expected.detach(), torch.float16)
    assert_near(torch.stack(gradients), torch.stack(expected_gradients), torch.float16)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(3).detach(), rtol=1e-3, atol=1e-3)


def columns(length, width):
    """Values that show which probabilities are kept, `width` of them at a time."""
    for some in torch.eye(length, dtype=torch.float16).split(width, dim=1):
        yield F.pad(some, (0, width - some.shape[1]))
