"""Our convolutions: on a GPU, what they compute, and that a shard has the same bits alone and beside others."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lockstep.backends.torch.kernels import convolution, weight_gradient_tf32
from lockstep.backends.torch.kernels.hopper import can_replace
from lockstep.backends.torch.session import deterministic_session, use_tf32
from lockstep.backends.torch.stacked import StackedTensor
from lockstep.core.device import Device

GPU = torch.device("cuda", 0)
NUM_SHARDS, NUM_IMAGES = 3, 5
on_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
    pytest.mark.skipif(torch.cuda.is_available() and not can_replace(), reason="convolutions are cuDNN's on this GPU"),
]


def images_last(*shape, **how):
    return torch.randn(*shape, **how).contiguous(memory_format=torch.channels_last)


def fit(images=(8, 64, 9, 9), kernel=(64, 64, 3, 3), moves=((1, 1), (1, 1)), precision="tf32", bias=None, **how):
    torch.backends.cudnn.conv.fp32_precision, before = precision, torch.backends.cudnn.conv.fp32_precision
    try:
        with FakeTensorMode():
            how |= {"device": "cuda", "memory_format": torch.channels_last}
            X, weight = torch.empty(images, **how), torch.empty(kernel, **how)
            bias = None if bias is None else torch.empty(bias, device="cuda")
            return convolution.fits(X, weight, bias, moves)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_what_our_kernels_are_for(monkeypatch):
    assert not fit()  # a tensor without memory is left to the compiler
    monkeypatch.setattr(convolution, "has_memory", lambda tensor: True)
    assert fit()
    assert fit(bias=64)
    assert fit(dtype=torch.bfloat16, precision="ieee")
    assert not fit(precision="ieee")  # float32 in full is cuDNN's
    assert not fit(images=(65, 64, 9, 9))  # so many fill a GPU
    assert not fit(images=(8, 3, 9, 9), kernel=(64, 3, 3, 3))
    assert not fit(kernel=(48, 64, 3, 3))
    assert not fit(moves=((1, 1), "same"))
    for moves in (((0, 1), (1, 1)), ((1, 1), (-1, 1)), ((1, 1), (0, 0))):  # PyTorch says what is wrong
        assert not fit(images=(8, 64, 2, 2), moves=moves)
    assert not fit(bias=32)
    assert not fit(images=(8, 64, 5000, 9))
    assert not fit(images=(64, 64, 256, 256))  # places in eight such shards have more than 31 bits
    assert not fit(dtype=torch.float64)
    assert not fit(dtype=torch.bfloat16, bias=64)  # of two types


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 28, 49, 784, 3136, 65537])
def test_numbers_are_divided_by_a_product(divisor):
    factor, shift = weight_gradient_tf32._division(divisor)
    assert -(2**31) <= factor < 2**31
    for number in (0, 1, divisor - 1, divisor, 12_345_678, 2**31 - divisor, 2**31 - 1):
        assert (2 * number * (factor % 2**32) >> 32) >> shift == number // divisor


SHAPES = [  # channels before and after, lines, columns, kernel, stride, padding
    (64, 64, 9, 7, (3, 3), 1, 1),
    (64, 128, 9, 8, (3, 3), 2, 1),
    (128, 192, 7, 7, (1, 1), 1, 0),
    (192, 64, 7, 8, (1, 1), (2, 1), 0),
    (64, 256, 11, 10, (5, 2), (3, 2), (2, 0)),
    (128, 64, 4, 4, (3, 3), 1, 1),
]


class Shards:
    """Images of several shards, and the output and gradients of each."""

    def __init__(self, shape, precision):
        num_in, num_out, *size, kernel, stride, padding = shape
        torch.manual_seed(0)
        self.how = {"stride": stride, "padding": padding}
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.images = [images_last(NUM_IMAGES, num_in, *size, device=GPU).to(self.dtype) for _ in range(NUM_SHARDS)]
        self.weight = (0.1 * images_last(num_out, num_in, *kernel, device=GPU)).to(self.dtype)
        self.bias = torch.randn(num_out, device=GPU, dtype=self.dtype)
        outs = F.conv2d(self.images[0].float(), self.weight.float(), **self.how).shape
        self.gradients = [images_last(*outs, device=GPU).to(self.dtype) for _ in range(NUM_SHARDS)]

    def of(self, images, gradient, dtype=None):
        """The output, and the gradients of images, weight and bias."""
        inputs = [each.detach().to(dtype or self.dtype).requires_grad_() for each in (images, self.weight, self.bias)]
        out = F.conv2d(*inputs, **self.how)
        return [out.detach(), *torch.autograd.grad(out, inputs, gradient.to(out.dtype))]


@pytest.fixture
def session(request):
    with deterministic_session([Device("cuda:0")]):
        if request.getfixturevalue("precision") == "tf32":
            use_tf32()
        yield


@pytest.mark.parametrize("precision", [pytest.param(name, marks=on_gpu) for name in ("tf32", "bf16")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_shard_has_the_same_bits_alone_and_beside_others(session, shape, precision):
    shards = Shards(shape, precision)
    alone = [shards.of(X, g) for X, g in zip(shards.images, shards.gradients, strict=True)]
    stacks = [StackedTensor(torch.stack(each)) for each in (shards.images, shards.gradients)]
    X, g = (each.contiguous(memory_format=torch.channels_last) for each in stacks)
    for number, found in enumerate(shards.of(X, g)):
        for shard in range(NUM_SHARDS):
            assert torch.equal(found.stack[shard], alone[shard][number])


@pytest.mark.parametrize("precision", [pytest.param(name, marks=on_gpu) for name in ("tf32", "bf16")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_those_of_double_precision(session, shape, precision):
    shards = Shards(shape, precision)
    images, gradient = shards.images[0], shards.gradients[0]
    moves = [convolution._pair(each) for each in shape[-2:]]
    assert convolution.fits(images, shards.weight, shards.bias, moves)
    found = shards.of(images, gradient)
    for own, exact in zip(found, shards.of(images, gradient, torch.float64), strict=True):
        assert own.shape == exact.shape
        assert (own.double() - exact).norm() <= (4e-3 if precision == "bf16" else 1.5e-3) * exact.norm()


@pytest.mark.parametrize("precision", [pytest.param("tf32", marks=on_gpu)])
def test_a_weights_gradient_by_triton_is_that_of_the_cuda_kernel(session, precision, monkeypatch):
    assert weight_gradient_tf32.can_multiply()
    shards = Shards(SHAPES[0], precision)
    by_cuda = shards.of(shards.images[0], shards.gradients[0])[2]
    monkeypatch.setattr(convolution, "can_multiply", lambda: False)
    by_triton = shards.of(shards.images[0], shards.gradients[0])[2]
    assert (by_cuda - by_triton).norm() < 1e-3 * by_cuda.norm()


@pytest.mark.parametrize("precision", [pytest.param("tf32", marks=on_gpu)])
def test_a_gradient_of_a_gradient_is_pytorchs(session, precision):
    shards = Shards(SHAPES[0], precision)
    X = shards.images[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(F.conv2d(X, shards.weight, **shards.how).square().sum(), X, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), X)
    Y = X.detach().double().requires_grad_()
    weight = shards.weight.double()
    (first,) = torch.autograd.grad(F.conv2d(Y, weight, **shards.how).square().sum(), Y, create_graph=True)
    (exact,) = torch.autograd.grad(first.square().sum(), Y)
    assert (second.double() - exact).norm() < 5e-3 * exact.norm()
