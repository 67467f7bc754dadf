"""Our kernels of norm layers leave alone what is being compiled; `test_cuda_kernels.py` has what they compute."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.backends import torch_attention, torch_batch_norm, torch_layer_norm


def layer_norm_fits():
    rows, weight, bias = (torch.empty(shape, device="cuda") for shape in ((300, 64), (64,), (64,)))
    return torch_layer_norm.fits(rows, [64], weight, bias)


def batch_norm_fits():
    images = torch.empty(4, 8, 5, 5, device="cuda", memory_format=torch.channels_last)
    return torch_batch_norm.fits(images, *(torch.empty(8, device="cuda") for _ in range(4)), True)


@pytest.mark.parametrize(
    ("module", "do_fit"),
    [(torch_layer_norm, layer_norm_fits), (torch_batch_norm, batch_norm_fits)],
    ids=["layer", "batch"],
)
def test_tensors_without_memory_are_left_to_the_compiler(monkeypatch, module, do_fit):
    with FakeTensorMode():
        assert not do_fit()
        monkeypatch.setattr(module, "has_memory", lambda tensor: True)
        assert do_fit()


def test_what_has_memory():
    assert torch_attention.has_memory(torch.ones(1))
    assert torch_attention.has_memory(torch.nn.Parameter(torch.ones(1)))
    with FakeTensorMode():
        assert not torch_attention.has_memory(torch.ones(1))
