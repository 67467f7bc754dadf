"""A replica of some layers of a model that is written for every framework: a stage, a share of its layers, or both.

The layers are differentiated one by one (`Backend.vjp`), with the bits of the whole model.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lockstep.backends import Tensor, cross_entropy
from lockstep.core.layout import Array, layout_of
from lockstep.models.model import Layer
from lockstep.parallel.tensor import layer_shares, slice_name
from lockstep.partition.batch import even_ranges
from lockstep.partition.placement import Part
from lockstep.replicas.flat import FlatReplica, FlatTrainSpec
from lockstep.replicas.replica import AllGatherTensors, Evaluated, Leaf, ReplicaState, Shard, StageTensors
from lockstep.schedules.reduction_tree import Node, sum_of

Pull = Callable[[Tensor], tuple[Tensor | None, list[Tensor]]]


class Slices(NamedTuple):
    """A layer in slices, as one rank sees it; a layer that is not sliced is one slice."""

    layer: Layer
    names: list[list[str]]  # of the parameters, of each slice
    widths: list[int]  # output units of each slice
    number: int  # this rank's, of those that share the layer
    num_ranks: int


def sliced_layer(layer: Layer, initial: dict[str, Array], num_slices: int, part: Part) -> Slices:
    """How a layer is sliced: `num_slices` is 0 where layers are not."""
    if not num_slices:
        return Slices(layer, [list(layer.params)], [0], 0, 1)
    num_units = initial[layer.params[0]].shape[layer.units[0]]
    widths = [len(part) for part in even_ranges(num_units, min(num_slices, num_units))]
    names = [[slice_name(name, at, len(widths)) for name in layer.params] for at in range(len(widths))]
    return Slices(layer, names, widths, part.layer_rank, part.num_layer_ranks)


class Call(NamedTuple):
    """One layer's forward pass of a shard: what its backward pass needs."""

    slices: Slices
    pulls: list[Pull]  # of this rank's slices


class PendingBackward(NamedTuple):
    """A shard that has gone forward."""

    calls: list[Call]
    loss: Tensor | None  # after the last stage
    gradient: Tensor | None  # of the loss, for the scores
    all_gather: AllGatherTensors


class LayeredReplica(FlatReplica):
    """One rank's layers, as one flat vector."""

    def __init__(
        self,
        spec: FlatTrainSpec,
        layers: Sequence[Slices],
        weights: dict[str, Array],
        device: Any,
        state: ReplicaState | None,
        part: Part,
    ) -> None:
        self._part, self._slices, backend = part, list(layers), spec.backend
        own = [name for slices in layers for at in self._own_of(slices) for name in slices.names[at]]
        spec = replace(spec, layout=layout_of({name: weights[name] for name in own}), compiled_sizes=frozenset())
        vector = backend.from_numpy(spec.layout.flatten([weights[name] for name in own]), device)
        super().__init__(spec, backend.copy_to(vector, device), state, part)
        self._pending: dict[int, PendingBackward] = {}
        self._is_last = part.stages[-1] == part.num_stages - 1
        self._device = device

    @staticmethod
    def _own_of(slices: Slices) -> range:
        return layer_shares(len(slices.widths), slices.num_ranks)[slices.number].slices

    def begin_step(self, step: int) -> None:
        self._pending.clear()

    def why_not_capturable(self) -> str:
        return "layers are computed one by one (--split, --slices)"

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        leaves = []
        for shard in shards:
            self.forward(shard, 0, None, all_gather)
            leaves.append(self.backward(shard.number, 0, None)[0])
        return leaves

    def forward(
        self, shard: Shard, stage: int, cut: StageTensors | None, all_gather: AllGatherTensors
    ) -> StageTensors | None:
        X, calls = shard.X if cut is None else cut.values[0], list[Call]()
        params = self._named_params()
        for number, slices in enumerate(self._slices):
            X, pulls = self._call(slices, params, X, cut is not None or number > 0, all_gather)
            calls.append(Call(slices, pulls))
        if not self._is_last:
            self._pending[shard.number] = PendingBackward(calls, None, None, all_gather)
            return StageTensors([X])
        backend = self._spec.backend
        loss, pull = backend.vjp(cross_entropy, [], X, True, shard.y)
        self._pending[shard.number] = PendingBackward(calls, loss, pull(loss * 0 + 1)[0], all_gather)
        return None

    def _call(
        self, slices: Slices, params: dict[str, Tensor], X: Tensor, needs_X: bool, all_gather: AllGatherTensors
    ) -> tuple[Tensor, list[Pull]]:
        """The output of a layer, and what takes the gradient of each of this rank's slices back."""
        backend = self._spec.backend
        found = [
            backend.vjp(slices.layer.function, [params[name] for name in slices.names[at]], X, needs_X)
            for at in self._own_of(slices)
        ]
        outputs = [out for out, _ in found]
        if slices.num_ranks > 1:
            outputs = all_gather(slices.layer.name, outputs)
        out = outputs[0] if len(slices.widths) == 1 else backend.concat_units(outputs)
        return out, [pull for _, pull in found]

    def backward(self, number: int, stage: int, gradients: list[Any] | None) -> tuple[Leaf, list[Any]]:
        pending = self._pending.pop(number)
        gradient = pending.gradient if gradients is None else gradients[0]
        by_name: dict[str, Tensor] = {}
        for call in reversed(pending.calls):
            gradient = self._go_back(call, gradient, by_name, pending.all_gather)
        return Leaf(self._joined([by_name[name] for name in self._layout.names]), pending.loss), [gradient]

    def _joined(self, gradients: list[Tensor]) -> Tensor:
        """All gradients as one vector, with zeros in between."""
        backend, pieces = self._spec.backend, list[Tensor]()
        for gradient, gap in zip(gradients, self._layout.pieces[1::2], strict=True):
            pieces += [gradient.reshape((-1,)), *([backend.zeros(gap, self._device)] if gap else [])]
        return backend.concat(pieces)

    def _go_back(self, call: Call, gradient: Tensor, by_name: dict[str, Tensor], all_gather: AllGatherTensors) -> Any:
        """The gradient of a layer's input; those of its parameters are put into `by_name`."""
        backend, slices = self._spec.backend, call.slices
        shares = layer_shares(len(slices.widths), slices.num_ranks)
        own, ends = shares[slices.number], np.cumsum(slices.widths)

        def leaf(at: int) -> Tensor | None:
            part = gradient
            if len(slices.widths) > 1:
                part = backend.copy_to(gradient[:, int(ends[at]) - slices.widths[at] : int(ends[at])], self._device)
            in_X, in_params = call.pulls[at - own.slices.start](part)
            by_name.update(zip(slices.names[at], in_params, strict=True))
            return in_X

        sums = [sum_of(node, leaf, lambda a, b: None if a is None else backend.add(a, b)) for node in own.nodes]
        if slices.num_ranks == 1:
            return sums[0]
        if any(call_sum is None for call_sum in sums) or not self._needs_gradient(slices):
            return None
        gathered = all_gather(f"the backward pass of {slices.layer.name}", sums)
        nodes = dict(zip([node for share in shares for node in share.nodes], gathered, strict=True))
        for node, left, right in own.sums:
            nodes[node] = backend.add(nodes[left], nodes[right])
        return nodes[Node(0, len(slices.widths))]

    def _needs_gradient(self, slices: Slices) -> bool:
        """Whether anything comes before a layer."""
        return self._part.stages[0] > 0 or slices is not self._slices[0]

    def evaluate(self, X: Any, y: Any) -> Evaluated:
        found = self.evaluate_stage(Shard(0, len(y), X, y), 0, None, lambda layer, tensors: tensors)
        assert isinstance(found, Evaluated), "it is the whole model"
        return found

    def evaluate_stage(
        self, shard: Shard, stage: int, cut: StageTensors | None, all_gather: AllGatherTensors
    ) -> StageTensors | Evaluated:
        X, params = shard.X if cut is None else cut.values[0], self._named_params()
        for slices in self._slices:
            X, _ = self._call(slices, params, X, False, all_gather)
        return self._evaluated(X, shard.y) if self._is_last else StageTensors([X])

    def _named_params(self) -> dict[str, Tensor]:
        values = self._spec.backend.unflatten(self._layout, self.flat)
        return dict(zip(self._layout.names, values, strict=True))
