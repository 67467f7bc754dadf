"""LeNet's kernels for GPUs compute what PyTorch's operations do; without a GPU, they are run by a CPU."""

import shutil

import pytest
import torch
from torch.nn import functional as F

import lockstep
from backends.torch.kernels.kernels_on_cpu import compiled_for_cpu, launch_on_cpu
from lockstep.backends.torch import TorchBackend
from lockstep.backends.torch.kernels import lenet_gpu as kernels
from lockstep.backends.torch.kernels.lenet_gpu import ConvReluPool2dOnGPU, has_kernels

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine")
# channels, height, width, output channels, kernel: LeNet's two, slices of them, and others
LENET = [(1, 28, 28, 20, 3), (20, 13, 13, 50, 5)]
SHAPES = [*LENET, (1, 26, 26, 5, 3), (20, 12, 12, 13, 5), (20, 13, 13, 12, 5), (3, 9, 10, 7, 4), (2, 6, 7, 1, 2)]


def layer(shapes, num_images, device="cpu"):
    channels, height, width, out, size = shapes
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(num_images, channels, height, width, generator=generator) - 0.3
    weight = 0.2 * torch.randn(out, channels, size, size, generator=generator)
    bias = 0.1 * torch.randn(out, generator=generator)
    return [tensor.to(device).requires_grad_() for tensor in (X, weight, bias)]


def with_gradients(function, given):
    output = function(*given)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return output.detach(), *torch.autograd.grad(output, given, grad)


def by_pytorch(X, weight, bias):
    return F.avg_pool2d(F.relu(F.conv2d(X.double(), weight.double(), bias.double())), 2)


def check(given):
    assert has_kernels(given[0], given[1], 2)
    for found, expected in zip(
        with_gradients(ConvReluPool2dOnGPU.apply, given), with_gradients(by_pytorch, given), strict=True
    ):
        assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.skipif(shutil.which("g++") is None, reason="it compiles the kernels for a CPU")
@pytest.mark.parametrize(("shapes", "num_images"), [(LENET[0], 2), (LENET[1], 2), ((3, 9, 10, 7, 4), 40)], ids=str)
def test_on_a_cpu_they_compute_what_pytorch_does(shapes, num_images, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "can_compile_kernels", lambda: True)
    monkeypatch.setattr(kernels, "compile_kernel", compiled_for_cpu(tmp_path))
    monkeypatch.setattr(kernels, "launch", launch_on_cpu)
    kernels._kernel.cache_clear()
    try:
        check(layer(shapes, num_images))
    finally:
        kernels._kernel.cache_clear()


@pytest.mark.parametrize("shapes", [(20, 13, 13, 50, 7), (64, 56, 56, 64, 3), (1, 2, 2, 4, 3), (1, 224, 224, 20, 3)])
def test_other_shapes_are_left_to_pytorch(shapes, monkeypatch):
    monkeypatch.setattr(kernels, "can_compile_kernels", lambda: True)
    channels, height, width, out, size = shapes
    X, weight = torch.empty(1, channels, height, width), torch.empty(out, channels, size, size)
    assert not has_kernels(X, weight, 2)
    X, weight = layer(LENET[0], 1)[:2]
    assert has_kernels(X, weight, 2)
    assert not has_kernels(X, weight, 3)
    assert not has_kernels(X.double(), weight, 2)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_on_a_gpu_they_compute_what_pytorch_does(shapes):
    given = layer(shapes, 40, "cuda:0")
    check(given)
    first, again = (with_gradients(ConvReluPool2dOnGPU.apply, given) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    some = ConvReluPool2dOnGPU.apply(given[0][5:9], *given[1:])
    assert torch.equal(some, first[0][5:9]), "an image's result depends on the others"


HOW = {"model": "lenet", "data": "fashion-mnist-mini", "epochs": 1}


@pytest.mark.cuda
@needs_gpu
def test_lenet_has_the_same_bits_on_a_gpu_compiled_or_not():
    compiled = lockstep.train(**HOW, devices="cuda:0", compile=True, quiet=True)
    assert compiled.weights_sha256 == lockstep.train(**HOW, devices="cuda:0", quiet=True).weights_sha256


def test_where_lenet_has_kernels_nothing_is_compiled_and_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr(TorchBackend, "lenet_kernels", ("cpu",))
    monkeypatch.setattr(TorchBackend, "compile", lambda self, function: pytest.fail("compiled"))
    found = lockstep.train(**HOW, devices="cpu:0", compile=True)
    assert found.weights_sha256 == lockstep.train(**HOW, devices="cpu:0", quiet=True).weights_sha256
    assert "there is nothing to compile (--compile)" in capsys.readouterr().err
