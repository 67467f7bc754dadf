"""Our own kernels on a GPU: sums of gradients in the order of the tree, and cross-entropy."""

import pytest
import torch
from torch.nn import functional as F

from lockstep.backends.torch_cross_entropy import can_fuse, fused_cross_entropy
from lockstep.backends.torch_gradient_pieces import GradientPieces
from lockstep.backends.torch_kernels import can_compile_kernels
from lockstep.core.layout import Layout
from lockstep.schedules.reduction_tree import sum_with_brackets

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
GPU = torch.device("cuda", 0)


def test_kernels_are_compiled():
    assert can_compile_kernels()


@pytest.mark.parametrize("num_shards", [2, 3, 5, 8])
def test_gradients_in_pieces_are_added_in_the_brackets_of_the_tree(num_shards):
    shapes = ((3, 5), (1,), (1030,), (7,), (64, 48))
    layout = Layout(tuple("abcde"), shapes)
    torch.manual_seed(num_shards)
    shards = []
    for number in range(num_shards):
        pieces = [torch.randn(shape, device=GPU).reshape(-1) * 10**number for shape in shapes]
        pieces[2] = pieces[2].bfloat16()
        pieces[3] = None if number == 1 else torch.randn(8, device=GPU)[1:]  # not aligned
        shards.append(GradientPieces(layout, pieces, GPU))
    brackets = sum_with_brackets([f"x{n}" for n in range(num_shards)], "({}+{})".format)
    expected = sum_with_brackets([shard.flat() for shard in shards], torch.add)
    assert torch.equal(shards[0].added(brackets, shards[1:]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_that_of_pytorch_in_double_precision(dtype):
    torch.manual_seed(0)
    scores = (4 * torch.randn(300, 1000, device=GPU)).to(dtype).requires_grad_()
    labels, weights = torch.randint(1000, (300,), device=GPU), torch.rand(300, device=GPU)
    labels[::7] = -100
    assert can_fuse(scores, labels)
    losses = fused_cross_entropy(scores, labels, -100)
    losses.backward(weights)
    exact = scores.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    expected.backward(weights.double())
    torch.testing.assert_close(losses.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(scores.grad.double(), exact.grad, rtol=tolerance, atol=2e-6)
    again = fused_cross_entropy(scores, labels, -100)
    assert torch.equal(again, losses)


def test_scores_that_are_no_numbers_give_a_loss_that_is_none():
    scores = torch.zeros(4, 1024, device=GPU)
    scores[1, 5] = float("nan")
    scores[2, 7] = float("inf")
    losses = fused_cross_entropy(scores, torch.zeros(4, dtype=torch.int64, device=GPU), -100)
    assert losses.isfinite().tolist() == [True, False, False, True]
