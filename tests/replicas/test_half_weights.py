"""bf16 copies of weights: which ones may be cast before a step."""

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.replicas.half_weights import CastCounter, HalfWeights


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.once, self.twice, self.tied = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.rand(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, X):
        Y = self.twice(self.twice(self.once(X)))
        return F.linear(self.norm(Y) @ self.tied, self.tied) + self.tied.sum()


def test_only_weights_that_are_cast_once_and_not_used_otherwise_are_found():
    net = Net()
    counter = CastCounter(dict(net.named_parameters()))
    with counter, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        net(torch.rand(3, 4)).sum()
    assert sorted(counter.cast_once()) == ["once.bias", "once.weight"]


def test_copies_follow_their_weights_and_stay_where_they_are():
    weight = nn.Parameter(torch.rand(8))
    halves = HalfWeights({"weight": weight})
    copy = halves.by_name["weight"]
    with torch.no_grad():
        weight.mul_(3)
    halves.refresh()
    assert copy is halves.by_name["weight"]
    assert torch.equal(copy, weight.detach().bfloat16())
