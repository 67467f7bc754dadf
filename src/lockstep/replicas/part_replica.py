"""A replica of a part of a PyTorch module: a stage of the network, a share of its layers, or both.

Several shards may have gone forward and not come back; what their backward passes need is kept by shard.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.backends.torch import plain_errors
from lockstep.core.errors import RunError
from lockstep.core.random import shard_seed
from lockstep.core.tracing import SpanName, span
from lockstep.models.losses import LossSum
from lockstep.replicas import module_state
from lockstep.replicas.buffers import BufferUpdates
from lockstep.replicas.crossing import Copied, Form, flattened, put_together, sharing_memory, with_memory_of
from lockstep.replicas.module import ModuleReplica
from lockstep.replicas.replica import AllGatherTensors, Evaluated, Leaf, Shard, StageTensors
from lockstep.replicas.sliced_layers import SliceContext


class ReceivedTensor:
    """A tensor that an earlier stage has handed over, and the gradients that go back for it, one for each pass."""

    def __init__(self, value: Tensor) -> None:
        self.gradients, self._taken = list[Tensor | None](), list[Tensor]()
        # a copy: the stage may write to it in place. The gradient is taken as it flows, in the strides that it has
        self.value = Copied.apply(value.detach().requires_grad_(value.requires_grad))
        self._version = self.value._version
        if value.requires_grad:
            self.value.register_hook(self._taken.append)  # a method of this object's own would keep both alive for ever

    def check_unchanged(self) -> None:
        """Refuses a stage that has written to it."""
        if self.value._version != self._version:
            raise RunError(
                "The model writes to a tensor in place that shares its memory with another one or is a buffer, and a "
                "cut between stages lies between: the other would not change with it. Cut elsewhere (--stages), or do "
                "not write in place."
            )

    def end_pass(self) -> None:
        """A backward pass is over."""
        self.gradients.append(self._taken.pop() if self._taken else None)
        self._taken.clear()


class PendingBackward(NamedTuple):
    """A shard that has gone forward."""

    received: list[ReceivedTensor]
    outputs: list[Tensor]  # what was handed to the next stage
    loss: LossSum | None  # after the last stage
    updates: BufferUpdates
    slices: SliceContext | None


class PartModuleReplica(ModuleReplica):
    """One rank's part of a module, with an optimizer of its own for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: dict[int, PendingBackward] = {}  # by the number of the shard
        self._is_last = self._part.stages[-1] == self._part.num_stages - 1
        self._splits_model = self._part.num_stages > 1 or self._part.num_layer_ranks > 1
        self._num_begun = 0  # steps
        self._kept: dict[str, str] | None = None  # before the shards of a step that is checked

    def begin_step(self, step: int) -> None:
        self._pending.clear()
        is_new = self._step != step
        super().begin_step(step)
        self._num_begun += is_new
        if is_new and self._num_begun == 2 and self._splits_model:  # what was None in the first step is no state
            self._kept = self.kept_state()

    def begin_update(self, step: int) -> None:
        """Refuses, in the second step, a model or a loss that keeps something: it would be the rank's own."""
        kept, self._kept = self._kept, None
        if kept is not None and (names := self.changed_state(kept)):
            raise RunError(
                f"While a shard is computed, {names[0]} changes. Every device has its own, so the weights would depend "
                f"on their number. In a model, make it a buffer (register_buffer); or split the data (--split data), "
                f"where it is found out whether it matters."
            )
        super().begin_update(step)

    def why_not_capturable(self) -> str:
        """Why its shards cannot be captured as a CUDA graph."""
        return "layers are computed in slices (--slices)"

    def _slices(self, all_gather: AllGatherTensors) -> SliceContext | None:
        """What the sliced layers of a forward pass need."""
        if not self._spec.num_slices:
            return None
        return SliceContext(all_gather if self._part.num_layer_ranks > 1 else _alone)

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        leaves = []
        for shard in shards:
            self.forward(shard, 0, None, all_gather)
            leaves.append(self.backward(shard.number, 0, None)[0])
        return leaves

    def forward(
        self, shard: Shard, stage: int, cut: StageTensors | None, all_gather: AllGatherTensors
    ) -> StageTensors | None:
        slices = self._slices(all_gather)
        received = [ReceivedTensor(value) for value in cut.values] if cut is not None else []
        if cut is not None:
            X = put_together([one.value for one in received], cut.form, self._device)
            shard = shard._replace(X=X, random=cut.random, is_cut=True)
        loss, outputs, form = None, list[Tensor](), None
        with plain_errors(self._device.type), span(SpanName.FORWARD):
            self._buffers.start_shard()
            # buffers are kept for backward, and the next shard writes to them
            with self._buffers.saved_as_copies(), slices.forward() if slices else nullcontext():
                if self._is_last:
                    loss = self._losses.of(self._own, shard)
                else:
                    outputs, form = flattened(self._losses.output(self._own, shard))
        shared = [received[number] for number in cut.sharing] if cut is not None else []
        for one in shared:
            one.check_unchanged()
        self._pending[shard.number] = PendingBackward(received, outputs, loss, self._buffers.updates(), slices)
        return None if self._is_last else self._cut(outputs, form, shard, [one.value for one in shared])

    def _cut(self, tensors: list[Tensor], form: Form, shard: Shard, shared: Sequence[Tensor] = ()) -> StageTensors:
        """What the next stage gets: values, not how they were computed. A buffer as it is now: shards change it.

        `shared` were received, and share memory with something in an earlier stage.
        """
        of_buffers = with_memory_of(tensors, self.module.buffers())
        values = [tensor.detach() for tensor in tensors]
        for number in of_buffers:
            values[number] = values[number].clone()
        sent = [value.requires_grad_(tensor.requires_grad) for value, tensor in zip(values, tensors, strict=True)]
        sharing = sorted({*sharing_memory(tensors), *of_buffers, *with_memory_of(tensors, shared)})
        return StageTensors(sent, self._random_state(shard), form, tuple(sharing))

    def _random_state(self, shard: Shard) -> Any:
        """How far the shard's random numbers have got; as they came, where this stage draws none."""
        return self._random.state() if self._random.has_drawn else shard.random

    def backward(self, number: int, stage: int, gradients: list[Any] | None) -> tuple[Leaf, list[Any]]:
        pending = self._pending.pop(number)
        with plain_errors(self._device.type), span(SpanName.BACKWARD):
            if pending.loss is not None:
                passes = [[(pending.loss.total, torch.ones_like(pending.loss.total))]]
            else:
                passes = _passes(pending.outputs, gradients or [])

            def after_pass() -> None:
                for tensor in pending.received:
                    tensor.end_pass()

            found, vector = self._gradients.of_part(passes, pending.slices, after_pass)
        loss = pending.loss or LossSum(torch.zeros(()), None)
        leaf = self._leaf(loss, found, vector, self._own, pending.updates)
        if pending.loss is None:
            leaf = leaf._replace(loss=None)
        return leaf, [
            gradient for of_pass in zip(*(a.gradients for a in pending.received), strict=True) for gradient in of_pass
        ]

    def evaluate(self, X: Any, y: Any) -> Evaluated:
        found = self.evaluate_stage(Shard(0, 0, X, y), 0, None, _alone)
        assert isinstance(found, Evaluated), "it is the whole model"
        return found

    def evaluate_stage(
        self, shard: Shard, stage: int, cut: StageTensors | None, all_gather: AllGatherTensors
    ) -> StageTensors | Evaluated:
        self.module.eval()
        slices = self._slices(all_gather)
        random = self._random.start(shard_seed(self._spec.seed, 0, 0), None if cut is None else cut.random)
        X = self._losses.in_memory_format(shard.X)
        if cut is not None:
            X = put_together(cut.values, cut.form, self._device)
        with (
            torch.no_grad(),
            plain_errors(self._device.type),
            self._losses.parameters_kept(),
            random,
            self._losses.autocast(),
            slices.forward() if slices else nullcontext(),
        ):
            if self._part.num_stages == 1:
                self._losses.prepare(self.module, shard.X)
            output = module_state.call(self.module, X)
            if self._is_last:
                found: StageTensors | Evaluated = self._losses.evaluated(output, shard.X, shard.y)
            else:
                found = self._cut(*flattened(output), shard)
        self._buffers.restore()  # evaluation does not change them
        return found


def _alone(layer: str, tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def _passes(outputs: list[Tensor], gradients: list[Any]) -> list[list[tuple[Tensor, Tensor]]]:
    """What each backward pass starts from: the outputs, as far as the later stages' passes have reached them."""
    each = [gradients[at : at + len(outputs)] for at in range(0, len(gradients), len(outputs) or 1)]
    return [[(out, found) for out, found in zip(outputs, one, strict=True) if found is not None] for one in each]
