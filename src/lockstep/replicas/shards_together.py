"""Shards that go through a model together: their samples stacked, and whether it gives the bits that each has alone."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lockstep.backends import flat
from lockstep.backends.torch.gradient_pieces import GradientPieces
from lockstep.backends.torch.stacked import CannotStack, Launches, StackedTensor
from lockstep.replicas.replica import Leaf, Shard

MIN_SHARE = 3  # launches for all shards to one that is repeated for each: else they are faster side by side


class Samples(NamedTuple):
    """Those of several shards, as stacked tensors; the launches of all that is computed from them are counted."""

    X: Any
    y: Any
    launches: Launches


def stacked_samples(shards: list[Shard]) -> Samples:
    """The samples of shards of one size."""
    launches = Launches()

    def stacked(*parts: Any) -> StackedTensor:
        if not all(isinstance(part, Tensor) for part in parts):
            raise CannotStack("samples that are no tensors")
        return StackedTensor(torch.stack(parts), launches)

    first, *others = shards
    X = tree_map(stacked, first.X, *(shard.X for shard in others))
    y = X if first.y is first.X else tree_map(stacked, first.y, *(shard.y for shard in others))
    return Samples(X, y, launches)


def is_worth_it(launches: Launches) -> bool:
    """Whether most of what was computed was computed for all shards at once."""
    return launches.together >= MIN_SHARE * launches.repeated


def has_all_gradients(leaf: Leaf) -> bool:
    """Whether no parameter's gradient is all zeros, as those behind a head of zeros are in a first step.

    Where it is, a comparison of gradients tells nothing about it.
    """
    if not isinstance(leaf.gradient, GradientPieces):
        return bool(flat(leaf.gradient).any())
    return all(any(bool(part.any()) for part in parts) for parts in leaf.gradient.pieces if parts)


def is_same(one: Leaf, other: Leaf) -> bool:
    """Whether two leaves have the same bits."""
    buffers = one.buffers or {}, other.buffers or {}
    pairs = [(flat(one.gradient), flat(other.gradient)), (one.loss, other.loss)]
    pairs += [(buffers[0][name], buffers[1].get(name)) for name in buffers[0]]
    is_same = one.used == other.used and buffers[0].keys() == buffers[1].keys()
    return is_same and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
