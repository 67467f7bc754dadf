"""LeNet on CPU: the fused operation against PyTorch's own three, and memory formats."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from lockstep.backends.torch.lenet_cpu import ConvReluPool2d, channels_last, scripted
from lockstep.core.device import Device
from lockstep.replicas.memory_format import flat_in_memory_order, shaped_like, wants_channels_last


def plain(X, weight, bias, size):
    return F.avg_pool2d(F.relu(F.conv2d(X, weight, bias)), size)


@pytest.mark.parametrize(
    ("samples", "channels", "side", "kernels", "kernel", "size"),
    [(5, 1, 28, 20, 3, 2), (32, 20, 13, 50, 5, 2), (3, 16, 8, 7, 3, 3), (2, 33, 9, 4, 1, 2), (40, 1, 9, 6, 4, 3)],
)
def test_result_and_gradients_equal_those_of_the_three_operations(samples, channels, side, kernels, kernel, size):
    random = torch.Generator().manual_seed(0)
    X = torch.randn(samples, channels, side, side, generator=random)
    params = (torch.randn(kernels, channels, kernel, kernel, generator=random), torch.randn(kernels, generator=random))
    for needs_input in (False, True):
        found = []
        for function in (plain, ConvReluPool2d.apply):
            inputs = [X.clone().requires_grad_(needs_input), *(tensor.clone().requires_grad_() for tensor in params)]
            out = function(*inputs, size)
            gradients = torch.autograd.grad(
                (out * torch.arange(out.numel()).view(out.shape)).sum(), inputs[not needs_input :]
            )
            found.append([out, *gradients])
        for expected, ours in zip(*found, strict=True):
            assert ours.shape == expected.shape
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5 * float(expected.detach().abs().max()))


def test_without_torchscript_functions_are_unchanged(monkeypatch):
    def removed(function):
        raise RuntimeError("no TorchScript")

    monkeypatch.setattr(torch.jit, "script", removed)
    assert scripted(removed) is removed


def test_without_torchscript_bits_are_the_same():
    code = """
import lockstep, torch
from lockstep.backends.torch.lenet_cpu import by_product
print(isinstance(by_product, torch.jit.ScriptFunction))
print(lockstep.train(2, num_epochs=1, data="fashion-mnist-mini", quiet=True).weights_sha256)
"""
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTORCH_JIT": jit},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for jit in "01"
    ]
    assert [is_script for is_script, _ in found] == ["False", "True"]
    assert found[0][1] == found[1][1]


def test_inputs_are_not_overwritten():
    X, weight = torch.randn(4, 1, 8, 8), torch.randn(3, 1, 3, 3)
    before = X.clone(), weight.clone()
    ConvReluPool2d.apply(X, weight, torch.zeros(3), 2)
    assert torch.equal(X, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_has_channels_last_strides(channels):
    images = torch.randn(2, channels, 5, 4)
    converted = channels_last(images)
    assert torch.equal(converted, images)
    assert converted.stride() == (5 * 4 * channels, 1, 4 * channels, channels)


@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (4, 1, 3, 3), (4, 3, 1, 1), (7, 2), (3,)])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_gradient_is_flattened_and_unflattened(shape, is_last):
    param = torch.randn(shape)
    if is_last and param.ndim == 4:
        param = param.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(shape)
    flat = flat_in_memory_order(gradient, param)
    assert flat.shape == (param.numel(),)
    back = shaped_like(param, flat)
    assert torch.equal(back, gradient)
    if param.ndim == 4 and min(shape[1:]) > 1:
        assert back.stride() == param.stride()


def test_memory_format_depends_on_module_device_and_precision_only():
    images, numbers = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)), torch.nn.Linear(1, 1)
    cpu, gpu = Device("cpu:1"), Device("cuda:0")
    assert [wants_channels_last(images, device, "fp32") for device in (cpu, gpu)] == [True, False]
    assert [wants_channels_last(images, gpu, precision) for precision in ("tf32", "bf16")] == [True, True]
    assert not any(wants_channels_last(numbers, device, "bf16") for device in (cpu, gpu))
