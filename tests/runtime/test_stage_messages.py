"""What goes from stage to stage as a message arrives with the bits, the dtype and the strides that it had."""

import pytest
import torch

from lockstep.core.serialization import pack, unpack
from lockstep.replicas.replica import StageTensors
from lockstep.runtime.stage_messages import (
    empty_for,
    tensor_from_plain,
    tensor_to_plain,
    tensors_from_plain,
    tensors_to_plain,
)

CPU = torch.device("cpu")
IMAGES = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
TENSORS = {
    "contiguous": IMAGES,
    "channels last": IMAGES.to(memory_format=torch.channels_last),
    "one sample, channels last": IMAGES[:1].to(memory_format=torch.channels_last),
    "one channel": IMAGES[:, :1].contiguous(),
    "one channel, channels last": IMAGES[:, :1].to(memory_format=torch.channels_last),
    "transposed": IMAGES[0, 0].T,
    "permuted": IMAGES.permute(2, 0, 3, 1),
    "expanded": IMAGES[:, :, :1, :1].expand(2, 3, 6, 7),
    "a column that is expanded": IMAGES[0, 0, :, :1].expand(4, 8),
    "a part of another": IMAGES[:, 1:2, ::2],
    "every second": IMAGES[0, 0, 0, ::2],
    "one number": torch.tensor(3.5),
    "nothing": torch.zeros(0, 4),
    "integers": torch.arange(6).reshape(2, 3),
    "booleans": torch.tensor([[True], [False]]),
    "bfloat16": IMAGES.bfloat16(),
    "float64": IMAGES.double(),
    "not a number": torch.tensor([float("nan"), -0.0, float("inf")]),
}


def sent(cut):
    """What arrives in another process."""
    plain, tensors = tensors_to_plain(cut)
    plain = unpack(pack(plain), is_strict=False)
    there = []
    for meta, tensor in zip(plain["tensors"], tensors, strict=True):
        assert tensor.is_contiguous()
        memory = empty_for(meta, CPU)
        assert memory.shape == tensor.shape
        there.append(memory.copy_(tensor))
    return tensors_from_plain(plain, there)


def check_same(found, tensor):
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert octets_of(found) == octets_of(tensor)
    has_gaps = 0 not in tensor.stride() and torch.empty_like(tensor).stride() != tensor.stride()
    if (
        tensor.numel() and not has_gaps
    ):  # PyTorch decides by the strides how it computes, also by those of dimensions of size one
        assert found.stride() == tensor.stride()
        assert torch.empty_like(found).stride() == torch.empty_like(tensor).stride()


def octets_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name):
    (found,) = sent(StageTensors([TENSORS[name]])).values
    check_same(found, TENSORS[name])
    if name != "nothing":
        check_same(tensor_from_plain(tensor_to_plain(TENSORS[name]), CPU), TENSORS[name])


def test_the_entries_of_an_expanded_tensor_are_sent_once():
    _, (tensor,) = tensors_to_plain(StageTensors([TENSORS["expanded"]]))
    assert tensor.numel() == 6


@pytest.mark.parametrize("wants", [True, False])
def test_a_tensor_says_whether_a_gradient_is_wanted(wants):
    tensor = torch.ones(2, requires_grad=wants)
    (found,) = sent(StageTensors([tensor])).values
    assert found.requires_grad == wants


def test_plain_values_and_the_random_state_come_along():
    values = [1, "two", None, 3.5, True, torch.ones(2), [4, 5]]
    found = sent(StageTensors(values, {"seed": 7, "offset": 12}))
    assert found.random == {"seed": 7, "offset": 12}
    assert torch.equal(found.values[5], values[5])
    assert [*found.values[:5], found.values[6]] == [*values[:5], values[6]]
