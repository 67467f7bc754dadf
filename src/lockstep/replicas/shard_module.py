"""What a shard of a module is computed with. Shards that are computed side by side have one each."""

import copy
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lockstep.replicas.attributes import Attributes
from lockstep.replicas.buffers import Buffers
from lockstep.replicas.keyed_random import KeyedRandom


class ShardModule:
    """A module, its buffers, its random numbers, and where the gradients of its parameters `names` come out."""

    def __init__(
        self, module: nn.Module, names: list[str], device: torch.device, sync_batch_norm: bool = False
    ) -> None:
        self.module, self._names, self._device = module, names, device
        named = dict(module.named_parameters())
        self.edges: list[Any] = [get_gradient_edge(named[name]) for name in names]
        self.buffers = Buffers(module, sync_batch_norm)
        self.attributes = Attributes(module)
        self.random = KeyedRandom(device)

    def twin(self) -> "ShardModule":
        """One with the same parameters, whose buffers start every step from where these are.

        Its gradients come out at edges of their own, on the stream that is the current one now.
        """
        own = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in self.module.parameters()}
        twin = ShardModule(copy.deepcopy(self.module, dict(own)), self._names, self._device)
        twin.buffers.follow(self.buffers)
        return twin
