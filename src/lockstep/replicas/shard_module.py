"""What a shard of a module is computed with. Shards that are computed beside each other have one each."""

import copy
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lockstep.replicas.attributes import Attributes
from lockstep.replicas.buffers import Buffers
from lockstep.replicas.keyed_random import KeyedRandom


class Part:
    """A module, its buffers, its random numbers, and where the gradients of its parameters `names` come out."""

    def __init__(self, module: nn.Module, names: list[str], place: torch.device, is_sync: bool = False) -> None:
        self.module, self._names, self._place = module, names, place
        named = dict(module.named_parameters())
        self.edges: list[Any] = [get_gradient_edge(named[name]) for name in names]
        self.buffers = Buffers(module, is_sync)
        self.attributes = Attributes(module)
        self.random = KeyedRandom(place)

    def twin(self) -> "Part":
        """One with the same parameters, whose buffers start every step from where these are.

        Its gradients come out at places of their own, on the stream that is the current one now.
        """
        own = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in self.module.parameters()}
        twin = Part(copy.deepcopy(self.module, dict(own)), self._names, self._place)
        twin.buffers.follow(self.buffers)
        return twin
