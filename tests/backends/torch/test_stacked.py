"""Stacked tensors: an operation on the tensors of several shards is the operation on each of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.backends.torch.stacked import CannotStack, Launches, StackedTensor, joined, per_shard

NUM_SHARDS = 3
OPERATIONS = {
    "relu": lambda x, w: F.relu(x),
    "in place": lambda x, w: (x * 1).mul_(2).add_(x),
    "relu in place": lambda x, w: F.relu(x + 0, inplace=True),
    "with what all have in common": lambda x, w: x * w[:, None, None] + w.sum(),
    "with fewer dimensions": lambda x, w: x + x.mean(dim=(0, 2, 3))[:, None, None],
    "a number of each shard": lambda x, w: x / x.abs().sum(),
    "another type": lambda x, w: x * x.double().sum(),
    "a number first": lambda x, w: x.mean() * x.bfloat16(),
    "a number of another type": lambda x, w: x.mean() + torch.tensor(1.37, dtype=torch.float64),
    "cast": lambda x, w: x.to(torch.bfloat16).float(),
    "compared": lambda x, w: torch.where(x > 0, x, w[:, None, None] * x),
    "view": lambda x, w: x.view(4, -1).view(-1, 16) * 2,
    "flatten": lambda x, w: x.flatten(1),
    "reshape": lambda x, w: x.transpose(0, 1).reshape(16, -1),
    "permute": lambda x, w: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "transposed": lambda x, w: x[:, 0, :, 0].t() + 1,
    "unsqueezed": lambda x, w: x.unsqueeze(-1).squeeze(4).unsqueeze(0).squeeze(0),
    "squeezed": lambda x, w: x[:, :1].squeeze(1) + x[:, 0:1, 0:1].squeeze((1, 2))[:, None],
    "expanded": lambda x, w: x[:, :1].expand(-1, 16, -1, -1) * x,
    "expanded with a new dimension": lambda x, w: x[0, 0].expand(4, 16, -1, -1) + x,
    "sliced": lambda x, w: x[:, 2:9:3],
    "selected": lambda x, w: x[1] + x[-1],
    "strided": lambda x, w: x.contiguous().as_strided((4, 16), (16, 1)),
    "split": lambda x, w: torch.cat(x.split([3, 13], dim=1)[::-1], dim=1),
    "chunks": lambda x, w: sum(x.chunk(4)),
    "indexed": lambda x, w: x[torch.tensor([2, 0])],
    "sum": lambda x, w: x.sum(),
    "mean": lambda x, w: x.mean(dim=(2, 3)),
    "maximum": lambda x, w: x.amax(dim=1),
    "product": lambda x, w: x.flatten(1) @ torch.ones(16 * 64, 5),
    "product with itself": lambda x, w: x.flatten(1) @ x.flatten(1).t(),
    "convolution": lambda x, w: F.conv2d(x, w.view(1, 16, 1, 1).repeat(8, 1, 3, 3)),
    "pool": lambda x, w: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2),
    "softmax": lambda x, w: x.flatten(1).log_softmax(dim=1),
    "norm": lambda x, w: F.layer_norm(x, x.shape[1:]),
    "channels last": lambda x, w: x.contiguous(memory_format=torch.channels_last) * 2,
    "detached": lambda x, w: x.detach() * x,
    "like": lambda x, w: torch.zeros_like(x) + torch.ones_like(x) * x,
}


def shards():
    torch.manual_seed(0)
    return torch.randn(NUM_SHARDS, 4, 16, 8, 8), torch.randn(16)


@pytest.mark.parametrize("what", OPERATIONS)
def test_an_operation_is_that_of_each_shard(what):
    stack, common = shards()
    operation = OPERATIONS[what]
    own = [part.clone().requires_grad_() for part in stack]
    weights = [common.clone().requires_grad_() for _ in stack]
    expected = [operation(X, w) for X, w in zip(own, weights, strict=True)]
    X, w = StackedTensor(stack.clone()).requires_grad_(), common.clone().requires_grad_()
    found = operation(X, w)
    assert isinstance(found, StackedTensor)
    assert (found.shape, found.dtype) == (expected[0].shape, expected[0].dtype)
    assert found.stride() == expected[0].stride() or found.is_contiguous() == expected[0].is_contiguous()
    for part, value in zip(found.stack, expected, strict=True):
        assert torch.equal(part, value)
    gradients = torch.autograd.grad(found, [X, w], torch.ones_like(found), allow_unused=True)
    of_each = [
        torch.autograd.grad(value, [x, v], torch.ones_like(value), allow_unused=True)
        for value, x, v in zip(expected, own, weights, strict=True)
    ]
    for number, gradient in enumerate(gradients):
        for shard, of_shard in enumerate(of_each):
            if gradient is None or of_shard[number] is None:
                assert gradient is of_shard[number] is None
            else:
                part = gradient.stack[shard] if isinstance(gradient, StackedTensor) else gradient
                assert torch.equal(part, of_shard[number])


def test_launches_are_counted():
    stack, _ = shards()
    launches = Launches()
    X = StackedTensor(stack, launches)
    F.relu(X.transpose(1, 2)) + 1
    assert launches == Launches(together=2, repeated=0)
    X.flatten(1) @ torch.ones(16 * 64, 2)
    assert launches == Launches(together=2, repeated=1)


def test_running_statistics_are_those_of_each_shard():
    stack, _ = shards()
    norms = [nn.BatchNorm2d(16) for _ in stack]
    expected = [norm(X) for norm, X in zip(norms, stack, strict=True)]
    norm = nn.BatchNorm2d(16)
    rows = torch.zeros(NUM_SHARDS, 40)  # those of a shard are not aligned
    norm._buffers["running_mean"] = StackedTensor(rows[:, 3:19])
    norm._buffers["running_var"] = StackedTensor(rows[:, 19:35].fill_(1.0))
    norm._buffers["num_batches_tracked"] = StackedTensor(torch.zeros(NUM_SHARDS, dtype=torch.int64))
    found = norm(StackedTensor(stack))
    for shard, own in enumerate(norms):
        assert torch.equal(found.stack[shard], expected[shard])
        assert torch.equal(norm.running_mean.stack[shard], own.running_mean)
        assert torch.equal(norm.running_var.stack[shard], own.running_var)
    assert norm.num_batches_tracked.stack.tolist() == [1] * NUM_SHARDS


def test_a_function_can_be_computed_for_each_shard():
    stack, common = shards()
    seen, first = [], float(common[0])

    @per_shard
    def scaled(X, factor, *, offset):
        seen.append(type(X))
        return X.view(-1) * factor[0] + offset

    X = StackedTensor(stack).requires_grad_()
    factor = common.requires_grad_()
    found = scaled(X, factor, offset=1.0)
    assert seen == [torch.Tensor] * NUM_SHARDS
    assert torch.equal(found.stack[1], stack[1].view(-1) * common[0] + 1.0)
    of_X, of_factor = torch.autograd.grad(found.sum(), [X, factor], StackedTensor(torch.arange(1.0, 4.0)))
    assert torch.equal(of_X.stack[2], torch.full_like(stack[2], 3 * first))
    assert torch.equal(of_factor.stack[:, 0], (stack.flatten(1) * torch.arange(1.0, 4.0)[:, None]).sum(1))
    assert torch.equal(scaled(stack[0], common, offset=1.0), found.stack[0])  # a plain tensor, too


@pytest.mark.parametrize(
    "operation",
    [
        lambda X, common: F.dropout(X),
        lambda X, common: float(X.sum()),
        lambda X, common: bool((X > 0).all()),
        lambda X, common: common.copy_(X[0, :, 0, 0]),
        lambda X, common: common.add_(X[0, :, 0, 0]),
        lambda X, common: X.diagonal().zero_(),
        lambda X, common: X.as_strided((2,), (1,), 3),
        lambda X, common: (X + 0).unsqueeze_(0),
        lambda X, common: X.data_ptr() and None,
    ],
    ids=["random", "number", "truth", "copied", "added", "diagonal", "place", "shape", "address"],
)
def test_what_cannot_be_done_for_several_shards_is_refused(operation):
    stack, common = shards()
    before = common.clone()
    with pytest.raises((CannotStack, RuntimeError)):
        operation(StackedTensor(stack), common)
    assert torch.equal(common, before)


def test_it_shows_what_is_in_it():
    assert repr(StackedTensor(torch.arange(2))) == "StackedTensor(tensor([0, 1]))"


def test_slices_of_channels_last_images_stay_channels_last():
    images = StackedTensor(torch.randn(2, 6, 4, 3, 3)).contiguous(memory_format=torch.channels_last)
    half = images[:3]
    found = joined(half)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found[3:], half.stack[1])
