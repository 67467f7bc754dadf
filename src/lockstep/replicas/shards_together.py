"""Shards that go through a model together: their samples stacked, and whether it gives the bits that each has alone."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lockstep.backends import flat
from lockstep.backends.torch_stacked import CannotStack, Launches, StackedTensor
from lockstep.replicas.replica import Leaf, Shard

MAX_TOGETHER = 8  # shards: more do not make kernels much faster
TOGETHER_BYTES = 8 << 30  # of all that they hold at a time
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


def number_together(alone: list[Leaf], together: list[Leaf], launches: Launches, num_bytes: int) -> int:
    """How many shards to compute together, where each takes `num_bytes`; 1 if bits differ, or little is gained."""
    if launches.together < MIN_SHARE * launches.repeated or not all(map(_is_same, alone, together)):
        return 1
    return max(2, min(MAX_TOGETHER, TOGETHER_BYTES // max(num_bytes, 1)))


def _is_same(one: Leaf, other: Leaf) -> bool:
    buffers = one.buffers or {}, other.buffers or {}
    pairs = [(flat(one.gradient), flat(other.gradient)), (one.loss, other.loss)]
    pairs += [(buffers[0][name], buffers[1].get(name)) for name in buffers[0]]
    is_same = one.used == other.used and buffers[0].keys() == buffers[1].keys()
    return is_same and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
