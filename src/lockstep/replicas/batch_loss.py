"""A loss that looks across the batch (contrastive, in-batch negatives): one loss of the outputs of all shards.

The outputs of all shards are gathered in shard order, so every rank computes the same loss of the same tensors. Its
gradient goes back through the rank's own shards.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.core.errors import RunError
from lockstep.core.random import shard_seed
from lockstep.data.dataset import leaves_of, map_leaves
from lockstep.models.losses import LossSum, over_batch
from lockstep.replicas.keyed_random import NoDraws
from lockstep.replicas.replica import AllGatherTensors, Shard
from lockstep.replicas.shard_loss import ShardLoss, check_depends_on_parameters
from lockstep.replicas.shard_module import ShardModule


class ShardResult(NamedTuple):
    """What a shard leaves."""

    loss: LossSum  # of the first shard it is the batch's; the others have none
    gradients: list[Tensor | None]
    buffers: Any


class BatchLoss:
    """The gradients of a rank's shards for a loss of the whole batch."""

    def __init__(self, losses: ShardLoss, seed: int, params: Sequence[Tensor]) -> None:
        self._losses, self._seed, self._params = losses, seed, list(params)

    def forward_backward(
        self, own: ShardModule, shards: list[Shard], all_gather: AllGatherTensors
    ) -> list[ShardResult]:
        """One result for each of the rank's shards."""
        outputs, updates = [], []
        for shard in shards:
            own.buffers.start_shard()
            with own.buffers.saved_as_copies():  # the next shard writes to them, before this one's backward pass
                outputs.append(self._losses.output(own, shard))
            updates.append(own.buffers.updates())
        counts = [int(count) for count in all_gather("sizes", [torch.tensor(shard.num_samples) for shard in shards])]
        joined, leaves, is_per_sample = _joined(outputs, counts, all_gather, "the model's output")
        y, *_ = _joined([shard.y for shard in shards], counts, all_gather, "the target")
        seed = shard_seed(self._seed, self._losses.step, len(counts))  # behind those of the shards
        with own.random.start(seed), self._losses.watched(), self._losses.autocast():
            loss = over_batch(self._losses.function, joined, y, sum(counts))
        check_depends_on_parameters(loss.total)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(loss.total, wanted, allow_unused=True))
        gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
        results = []
        for shard, output, update in zip(shards, outputs, updates, strict=True):
            start = sum(counts[: shard.number])
            parts = [
                _part(gradient, start, shard, is_split)
                for gradient, is_split in zip(gradients, is_per_sample, strict=True)
            ]
            total = loss.total if shard.number == 0 else torch.zeros_like(loss.total)
            weight = loss.weight if shard.number == 0 else torch.zeros_like(loss.weight)
            results.append(ShardResult(LossSum(total, weight), self._backward(own, output, parts), update))
        return results

    def _backward(self, own: ShardModule, output: Any, gradients: list[Tensor | None]) -> list[Tensor | None]:
        pairs = [
            (leaf, gradient)
            for leaf, gradient in zip(leaves_of(output), gradients, strict=True)
            if gradient is not None and isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not pairs:
            return [None] * len(self._params)
        tensors, starts = zip(*pairs, strict=True)
        with NoDraws(own.random):  # activation checkpointing draws the shard's numbers again
            return list(torch.autograd.grad(tensors, self._params, starts, allow_unused=True))


def _joined(
    of_shards: list[Any], counts: list[int], all_gather: AllGatherTensors, what: str
) -> tuple[Any, list[Tensor], list[bool]]:
    """The same for the whole batch, in shard order; its leaves, which can get gradients; which are split by samples."""
    leaves, is_per_sample = list[Tensor](), list[bool]()
    for number, own in enumerate(zip(*map(leaves_of, of_shards), strict=True)):
        if not all(isinstance(tensor, Tensor) for tensor in own):
            raise RunError(f"Entry {number} of {what} is a {type(own[0]).__name__}: only tensors can be joined.")
        everywhere = all_gather(f"{what}, entry {number}", [tensor.detach() for tensor in own])
        is_split = all(x.ndim and len(x) == count for x, count in zip(everywhere, counts, strict=True))
        is_per_sample.append(bool(is_split))
        leaf = torch.cat(everywhere) if is_split else _common(everywhere, f"{what}, entry {number}")
        needs_gradient = leaf.is_floating_point() and any(tensor.requires_grad for tensor in own)
        leaves.append(leaf.requires_grad_(needs_gradient))
    rest = iter(leaves)
    return map_leaves(of_shards[0], lambda _: next(rest)), leaves, is_per_sample


def _common(everywhere: list[Tensor], what: str) -> Tensor:
    if all(torch.equal(tensor, everywhere[0]) for tensor in everywhere):  # like a temperature
        return everywhere[0].clone()
    raise RunError(
        f"{what[0].upper()}{what[1:]}, is neither one entry for each sample nor the same for all shards: a loss over "
        f"the batch cannot join it."
    )


def _part(gradient: Tensor | None, start: int, shard: Shard, is_split: bool) -> Tensor | None:
    """A shard's part; what all shards have in common gets its gradient from the first."""
    if gradient is None:
        return None
    if is_split:
        return gradient[start : start + shard.num_samples]
    return gradient if shard.number == 0 else None
