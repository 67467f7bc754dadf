"""Our own kernels on a GPU: sums of gradients in the order of the tree, cross-entropy, attention, norms."""

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lockstep.backends.torch.gradient_pieces import GradientPieces
from lockstep.backends.torch.kernels.cross_entropy import can_fuse, fused_cross_entropy
from lockstep.backends.torch.kernels.hopper import can_replace
from lockstep.backends.torch.kernels.nvrtc import can_compile_kernels
from lockstep.backends.torch.session import deterministic_session
from lockstep.core.device import Device
from lockstep.core.layout import Layout
from lockstep.schedules.reduction_tree import brackets_of, sum_with_brackets

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
    brackets = brackets_of(num_shards)
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


ATTENTION = [
    (2, 3, 197, 64, False),
    (2, 3, 200, 64, True),
    (1, 2, 256, 32, True),
    (2, 2, 130, 128, True),
    (1, 1, 1, 64, True),
]


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize(("samples", "heads", "length", "width", "is_causal"), ATTENTION)
def test_attention_in_a_session_has_the_gradients_of_pytorch(samples, heads, length, width, is_causal):
    torch.manual_seed(0)
    joined = torch.randn(samples, length, 3 * heads * width, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(samples, length, heads, width, device=GPU).transpose(1, 2)

    def gradient_of(inputs, **how):
        parts = inputs.view(samples, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts, is_causal=is_causal, **how)
        return torch.autograd.grad(found, inputs, weights.to(found.dtype))[0]

    exact = gradient_of(joined.detach().double().requires_grad_())
    with deterministic_session([Device("cuda:0")]):
        found, again = gradient_of(joined), gradient_of(joined)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            gradient_of(joined)
        gradient_of(joined.detach().float().requires_grad_())  # PyTorch's
    assert torch.equal(found, again)
    assert (found.double() - exact).norm() < 0.02 * exact.norm()
    if can_replace():
        assert any("_keys_and_values" in event.name for event in seen.events())
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        gradient_of(joined)
    assert not any("_keys_and_values" in event.name for event in seen.events())


@pytest.mark.filterwarnings("ignore")  # of the first matrix product of a process
@pytest.mark.skipif(not can_replace(), reason="attention with dropout is PyTorch's on this GPU")
@pytest.mark.parametrize("dropout", [0.1, 0.75])
@pytest.mark.parametrize(("samples", "heads", "length", "width", "is_causal"), ATTENTION)
def test_attention_with_dropout_has_the_gradients_of_the_probabilities_that_it_keeps(
    samples, heads, length, width, is_causal, dropout
):
    from lockstep.backends.torch.kernels.attention_triton import Attention, Saved, attention_backward, attention_forward

    torch.manual_seed(0)
    inputs = torch.randn(3, samples, heads, length, width, device=GPU, dtype=torch.bfloat16)
    gradient = torch.randn_like(inputs[0])
    how = Attention(is_causal, width**-0.5, dropout, torch.randint(2**62, (2,), device=GPU))
    columns = torch.eye(length, device=GPU, dtype=torch.bfloat16).split(width, dim=1)  # values that show what is kept
    kept = [torch.zeros(length, width, device=GPU, dtype=torch.bfloat16) for _ in columns]
    for part, some in zip(kept, columns, strict=True):
        part[:, : some.shape[1]] = some
    shown = [attention_forward((inputs[0], inputs[1], part.expand_as(inputs[2])), how)[0] for part in kept]
    is_kept = (torch.cat(shown, dim=3)[..., :length] != 0).double()

    exact = [tensor.double().requires_grad_() for tensor in inputs]
    scores = exact[0] @ exact[1].transpose(2, 3) * width**-0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(length, length, device=GPU, dtype=torch.bool).tril(), -torch.inf)
    expected = (scores.softmax(3) * is_kept / (1 - dropout)) @ exact[2]
    expected_gradients = torch.autograd.grad(expected, exact, gradient.double())

    out, logsumexp = attention_forward(tuple(inputs), how)
    found = attention_backward(gradient, Saved(tuple(inputs), out, logsumexp), how)
    gradients, exact_gradients = torch.stack(found).double(), torch.stack(expected_gradients)
    assert (out.double() - expected).norm() <= 0.01 * expected.norm()
    assert (gradients - exact_gradients).norm() <= 0.01 * exact_gradients.norm()


def test_attention_drops_the_given_share_and_other_probabilities_for_another_seed():
    length = width = 128
    queries = torch.zeros(8, 4, length, width, device=GPU, dtype=torch.bfloat16)  # all probabilities are equal
    values = torch.eye(length, device=GPU, dtype=torch.bfloat16).expand(8, 4, length, width)

    def kept(seed):
        torch.manual_seed(seed)
        return F.scaled_dot_product_attention(queries, queries, values, dropout_p=0.25) != 0

    with deterministic_session([Device("cuda:0")]):
        first, again, other = kept(1), kept(1), kept(2)
    assert torch.equal(first, again)
    shares = [found.double().mean().item() for found in (first, other, first == other)]
    assert shares == pytest.approx([0.75, 0.75, 0.75**2 + 0.25**2], abs=0.005)  # independent of each other
    rows = first.double().mean(dim=3)
    assert rows.std() < 1.2 * (0.75 * 0.25 / length) ** 0.5  # as many in each row, but for chance


IMAGES = [(32, 64, 56, 56), (5, 80, 9, 7), (4, 2048, 7, 7), (2, 3, 30, 30)]


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", IMAGES)
def test_batch_norm_in_a_session_is_that_of_pytorch(shape, dtype):
    torch.manual_seed(0)
    images = (5 + 2 * torch.randn(shape, device=GPU)).to(dtype).contiguous(memory_format=torch.channels_last)
    weights = torch.randn(shape, device=GPU).to(dtype)

    def computed(images, dtype):
        torch.manual_seed(1)
        layer = torch.nn.BatchNorm2d(shape[1])
        torch.nn.init.normal_(layer.weight)  # before it is on the GPU, which draws others in double precision
        layer.to(GPU, dtype)
        images = images.detach().requires_grad_()
        out = layer(images)
        gradients = torch.autograd.grad(out, [images, *layer.parameters()], weights.to(out.dtype))
        return [out.detach(), *gradients, layer.running_mean, layer.running_var]

    expected = computed(images.double(), torch.float64)
    with deterministic_session([Device("cuda:0")]):
        found, again = computed(images, torch.float32), computed(images, torch.float32)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            computed(images, torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, once_more, exact in zip(found, again, expected, strict=True):
        assert torch.equal(ours, once_more)
        assert (ours.double() - exact).norm() < tolerance * exact.norm()
    assert any("_moments" in event.name for event in seen.events()) == can_replace()


def test_the_gradient_of_a_gradient_goes_through_batch_norm():
    images = torch.randn(4, 8, 5, 5, device=GPU).contiguous(memory_format=torch.channels_last).requires_grad_()
    layer = torch.nn.BatchNorm2d(8).to(GPU)

    def penalty():
        (gradient,) = torch.autograd.grad((layer(images) ** 3).sum(), images, create_graph=True)
        return torch.autograd.grad((gradient**2).sum(), images)[0]

    expected = penalty()
    with deterministic_session([Device("cuda:0")]):
        torch.testing.assert_close(penalty(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize(
    ("dtype", "width", "is_autocast"),
    [(torch.float32, 768, False), (torch.float32, 100, True), (torch.bfloat16, 768, True)],
)
def test_layer_norm_in_a_session_is_that_of_pytorch(dtype, width, is_autocast):
    torch.manual_seed(0)
    rows = (3 + 2 * torch.randn(4, 197, width, device=GPU)).to(dtype)
    weights = torch.randn(rows.shape, device=GPU)

    def computed(rows, dtype):
        torch.manual_seed(1)
        layer = torch.nn.LayerNorm(width)
        torch.nn.init.normal_(layer.weight)
        layer.to(GPU, dtype)
        rows = rows.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=is_autocast and dtype != torch.float64):
            out = layer(rows)
        return [out.detach(), *torch.autograd.grad(out, [rows, *layer.parameters()], weights.to(out.dtype))]

    expected = computed(rows.double(), torch.float64)
    theirs = computed(rows, torch.float32)
    with deterministic_session([Device("cuda:0")]):
        found, again = computed(rows, torch.float32), computed(rows, torch.float32)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            computed(rows, torch.float32)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for ours, once_more, pytorchs, exact in zip(found, again, theirs, expected, strict=True):
        assert torch.equal(ours, once_more)
        assert ours.dtype == pytorchs.dtype
        assert (ours.double() - exact).norm() < tolerance * exact.norm()
    assert any("_gradients" in event.name for event in seen.events()) == can_replace()


def test_the_gradient_of_a_gradient_goes_through_layer_norm():
    rows, layer = torch.randn(300, 64, device=GPU, requires_grad=True), torch.nn.LayerNorm(64).to(GPU)

    def penalty():
        (gradient,) = torch.autograd.grad((layer(rows) ** 3).sum(), rows, create_graph=True)
        return torch.autograd.grad((gradient**2).sum(), rows)[0]

    expected = penalty()
    with deterministic_session([Device("cuda:0")]):
        torch.testing.assert_close(penalty(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_rows_in_a_session_are_those_of_pytorch(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(6304, 768, device=GPU).to(dtype)
    images = torch.randn(8, 48, 20, 20, device=GPU).to(dtype).contiguous(memory_format=torch.channels_last)
    cases = [(matrix, [0]), (matrix.view(32, 197, 768), [0, 1]), (images, [0, 2, 3]), (matrix[:, :40], [0])]
    cases += [(matrix[:256], [0])]  # that one program reads
    others = [(matrix, [1]), (matrix, [0, 1]), (matrix[:3], [0])]  # are PyTorch's

    def sums():
        return [tensor.sum(dims, keepdim) for tensor, dims in cases + others for keepdim in (False, True)]

    exact = [tensor.double().sum(dims, keepdim) for tensor, dims in cases + others for keepdim in (False, True)]
    with deterministic_session([Device("cuda:0")]):
        found, again = sums(), sums()
        assert matrix.long().sum([0]).dtype == torch.int64
        assert matrix.sum([0], dtype=torch.float64).dtype == torch.float64
    for ours, once_more, expected in zip(found, again, exact, strict=True):
        assert torch.equal(ours, once_more)
        assert ours.shape == expected.shape
        assert (ours.double() - expected).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()
