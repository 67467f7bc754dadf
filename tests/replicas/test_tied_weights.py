"""The gradient of a weight that is looked up in and multiplied by: the bits of PyTorch's own, in two parts."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from lockstep.replicas.tied_weights import tied_weights


class Model(nn.Module):
    """An embedding, a layer, and the embedding again; what else uses it is a test's choice."""

    def __init__(self, more=None, **how):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.layer, self.more = nn.Embedding(40, 8, **how), nn.Linear(8, 8), more

    def forward(self, X):
        Y = self.layer(self.tokens(X))
        if self.more is not None:
            Y = self.more(Y, self.tokens.weight)
        return F.linear(Y, self.tokens.weight)


def loss_of(model, precision=torch.bfloat16):
    torch.manual_seed(1)
    X, y = torch.randint(20, (30,)), torch.randint(40, (30,))  # rows 20 to 39 are not looked up, others more than once
    with torch.autocast("cpu", precision, enabled=precision is not None, cache_enabled=False):
        scores = model(X)
    return F.cross_entropy(scores.float(), y, reduction="sum")


def edges_of(model):
    return [get_gradient_edge(param) for param in model.parameters()]


@pytest.mark.parametrize("how", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
def test_two_parts_have_the_bits_of_pytorchs_gradient(how):
    model = Model(**how)
    loss = loss_of(model)
    ((number, weight),) = tied_weights(loss, edges_of(model)).items()
    assert number == 0
    found = torch.autograd.grad(loss, [weight.copy, weight.rows])
    of_copy, looked_up = weight.parts(*found)
    assert of_copy.dtype == torch.bfloat16
    loss_of(model).backward()
    assert torch.equal(of_copy.float() + looked_up, model.tokens.weight.grad)


OTHERS = {
    "a third use": lambda Y, weight: Y + weight[:1],
    "two products": lambda Y, weight: F.linear(F.linear(Y, weight), weight.t()),
}


@pytest.mark.parametrize("use", OTHERS)
def test_a_weight_that_is_used_in_other_ways_is_left_alone(use):
    model = Model(more=OTHERS[use])
    assert tied_weights(loss_of(model), edges_of(model)) == {}


def test_in_float32_there_is_nothing_to_gain():
    model = Model()
    assert tied_weights(loss_of(model, None), edges_of(model)) == {}


def test_another_kind_of_copy_is_made_float32():
    model = Model()
    ((_, weight),) = tied_weights(loss_of(model, torch.float16), edges_of(model)).items()
    of_copy, looked_up = weight.parts(torch.ones(40, 8, dtype=torch.float16), torch.ones(30, 8))
    assert of_copy.dtype == looked_up.dtype == torch.float32


def test_a_part_that_does_not_arrive_is_none():
    model = Model()
    ((_, weight),) = tied_weights(loss_of(model), edges_of(model)).items()
    rows = torch.ones(30, 8)
    assert weight.parts(None, None) is None
    assert weight.parts(None, rows).shape == (40, 8)
    assert torch.equal(weight.parts(rows, None), rows)
