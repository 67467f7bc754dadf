"""Gradients in pieces on a CPU: made one vector, and added two at a time; `test_cuda_kernels.py` has those on a GPU."""

import torch

from lockstep.backends.torch.gradient_pieces import GradientPieces
from lockstep.core.layout import Layout

LAYOUT = Layout(("a", "b", "c"), ((3, 5), (1,), (40,)))
CPU = torch.device("cpu")


def pieces(seed, missing=()):
    torch.manual_seed(seed)
    found = [torch.randn(15), torch.randn(1), torch.randn(40)]
    return GradientPieces(LAYOUT, [None if n in missing else piece for n, piece in enumerate(found)], CPU)


def test_a_vector_has_zeros_between_parameters_and_for_those_without_a_gradient():
    vector = pieces(0, missing=[1]).flat()
    assert len(vector) == LAYOUT.size
    assert torch.equal(vector[:15], pieces(0).pieces[0][0])
    assert not vector[15:32].any()
    assert torch.equal(vector[32:72], pieces(0).pieces[2][0])
    assert not vector[72:].any()


def test_a_stage_may_have_no_parameters_or_no_gradient():
    assert len(GradientPieces(Layout((), ()), [], CPU).flat()) == 0
    assert not pieces(0, missing=[0, 1, 2]).flat().any()


def test_a_sum_has_the_bits_of_the_sum_of_the_vectors():
    left, right = pieces(0, missing=[1]), pieces(1, missing=[2])
    assert left.can_add(2)
    assert not left.can_add(3)
    expected = left.flat() + right.flat()
    assert torch.equal(left.added("(x0+x1)", [right]), expected)
    assert torch.equal(left.pieces[0][0], pieces(0).pieces[0][0])  # nothing was overwritten


def test_low_precision_is_added_in_float32():
    left, right = (GradientPieces(Layout(("a",), ((4,),)), [torch.randn(4).bfloat16()], CPU) for _ in range(2))
    found = left.added("(x0+x1)", [right])
    assert found.dtype == torch.float32
    assert torch.equal(found[:4], left.pieces[0][0].float() + right.pieces[0][0].float())


def test_a_gradient_in_two_parts_is_their_sum():
    torch.manual_seed(0)
    layout, whole = Layout(("a",), ((6,),)), torch.randn(6)
    parts = [(torch.randn(6).bfloat16(), torch.randn(6)) for _ in range(2)]
    left, right = (GradientPieces(layout, [each], CPU) for each in parts)
    sums = [first.float() + second for first, second in parts]
    assert torch.equal(left.flat()[:6], sums[0])
    assert torch.equal(left.added("(x0+x1)", [right])[:6], sums[0] + sums[1])
    assert torch.equal(left.added("(x0+x1)", [GradientPieces(layout, [whole], CPU)])[:6], sums[0] + whole)
