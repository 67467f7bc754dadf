"""What a shard is computed with: a module, its buffers and its random numbers. Shards side by side have one each."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lockstep.core.errors import RunError
from lockstep.replicas.buffers import Buffers
from lockstep.replicas.keyed_random import KeyedRandom


class ShardModule:
    """A module, its buffers, its random numbers, and the gradient edges of its parameters `names`."""

    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        device: torch.device,
        sync_batch_norm: bool = False,
        num_together: int = 0,
    ) -> None:
        self.module, self._names, self._device = module, names, device
        named = dict(module.named_parameters())
        self.edges: list[Any] = [get_gradient_edge(named[name]) for name in names]
        self.buffers = Buffers(module, sync_batch_norm, num_together)
        self.random = KeyedRandom(device)
        self._attributes = [
            (f"{prefix}.{name}" if prefix else name, owner, name, value, getattr(value, "_version", 0))
            for prefix, owner in module.named_modules()
            for name, value in vars(owner).items()
            if not name.startswith("_") and name != "training" and isinstance(value, (int, float, Tensor))
        ]

    def clone(self, copies: Mapping[str, Tensor] | None = None, num_together: int = 0) -> "ShardModule":
        """One with the same parameters and its own gradient edges, on the current stream; its buffers follow these.

        Parameters with an entry in `copies` are that tensor instead. With `num_together`, it is for so many shards at
        once, whose samples are stacked tensors.
        """
        own = {
            id(param): nn.Parameter((copies or {}).get(name, param.detach()), requires_grad=param.requires_grad)
            for name, param in self.module.named_parameters()
        }
        module = copy.deepcopy(self.module, dict(own))
        clone = ShardModule(module, self._names, self._device, num_together=num_together)
        clone.buffers.stats.follow(self.buffers.stats)
        return clone

    def renew_edges(self) -> None:
        """Makes the gradient edges anew, on the current stream: gradients of one parameter are added up there."""
        self.edges = []  # the old ones have to be gone first
        named = dict(self.module.named_parameters())
        self.edges = [get_gradient_edge(named[name]) for name in self._names]

    def check_attributes(self) -> None:
        """Refuses a module that has changed a number or tensor among its attributes. One that was None is no state."""
        for label, owner, name, before, version in self._attributes:
            now = vars(owner).get(name)
            if isinstance(before, Tensor):
                is_changed = isinstance(now, Tensor) and (now is not before or now._version != version)
            else:
                is_changed = type(now) is type(before) and now != before
            if is_changed:
                raise RunError(
                    f"The model changes its attribute {label} in the forward pass. Every device has its own, so the "
                    f"result would depend on their number. Make it a buffer: register_buffer({name!r}, ...)."
                )
