"""A module's side of CUDA graph capture: each shard has a clone of the module, with its own buffers and generator.

Where kernels can compute several shards in one launch, these shards have one clone together.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.backends import Pieces, flat
from lockstep.backends.torch import is_capturing, plain_errors
from lockstep.core.errors import CaptureError
from lockstep.core.random import shard_seed
from lockstep.core.tracing import SpanName, span
from lockstep.models.losses import LossSum
from lockstep.replicas.buffers import BufferUpdates
from lockstep.replicas.half_weights import CastCounter, HalfWeights
from lockstep.replicas.module import ModuleReplica
from lockstep.replicas.replica import AllGatherTensors, Capturable, Leaf, Shard
from lockstep.replicas.shard_module import ShardModule
from lockstep.replicas.shards_together import Samples, has_all_gradients, is_same, is_worth_it, stacked_samples


class CapturableModuleReplica(ModuleReplica, Capturable):
    """A replica whose shards can be computed side by side, and captured."""

    _is_captured = False

    def why_not_capturable(self) -> str:
        if self._batch_loss is not None:
            return "the loss is one of the whole batch (--over batch)"
        return "statistics of the whole batch are exchanged in between (--batch-norm sync)" if self._sync else ""

    def begin_capture(self, step: int) -> None:
        if not self._is_captured:
            self._clones: dict[int, ShardModule] = {}  # by the number of the shard
            self._groups: dict[tuple[int, ...], ShardModule] = {}  # by the numbers of shards; captured graphs use them
            self._go_together: dict[int, bool] = {}  # by the samples of a shard
            self._halves: HalfWeights | None = None  # not known yet
        elif self._halves is not None:
            self._halves.refresh()
        if is_capturing(self._device):  # nothing is computed now
            for computed in (self._own, *self._clones.values(), *self._groups.values()):
                computed.buffers.stop_comparing()
        else:
            self.undo_step()
        self._is_captured, self._step = True, 0
        self.begin_step(step)

    def begin_replay(self, step: int) -> None:
        for number, clone in self._clones.items():
            clone.random.start(shard_seed(self._spec.seed, step, number))
        self._is_unfinished, self._step = True, step

    def discard_capture(self) -> None:
        self.undo_step()
        self._clones, self._groups = {}, {}
        self._is_captured, self._is_unfinished, self._step = False, False, 0

    def update_settings(self) -> Any:
        found = self._update.on_gpu
        return found.settings() if found and found.is_capturable and not self._random.has_drawn else None

    def capture_generators(self) -> list[Any]:
        return [clone.random.generator for clone in self._clones.values() if clone.random.has_drawn]

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        if not self._is_captured:
            return super().forward_backward(shards, all_gather)
        if len(shards) > 1:
            return self._leaves_together(shards, stacked_samples(shards))
        return [self._captured_leaf(shard) for shard in shards]

    def go_together(self, shards: list[Shard]) -> bool:
        size = shards[0].num_samples
        if not self._spec.channels_last or self._spec.compiles:
            return False  # only images have kernels for several shards
        if size not in self._go_together:
            self._go_together[size] = self._try_together(shards)
        return self._go_together[size]

    def _try_together(self, shards: list[Shard]) -> bool:
        """Whether these shards have the same bits together as one by one, and most launches are for all of them."""
        alone = [self._captured_leaf(shard) for shard in shards]
        has_drawn = any(self._clones[shard.number].random.has_drawn for shard in shards)
        if has_drawn or not all(map(has_all_gradients, alone)):
            return False
        try:
            samples = stacked_samples(shards)
            together = self._leaves_together(shards, samples)
        except Exception:  # a model may do anything with its tensors: then it is computed shard by shard
            return False
        return is_worth_it(samples.launches) and all(map(is_same, alone, together))

    def _leaves_together(self, shards: list[Shard], samples: Samples) -> list[Leaf]:
        """The leaves of shards of one size, from a clone that computes all of them at once."""
        if self._halves is None:
            self._halves = self._half_weights(shards[0])
        numbers = tuple(shard.number for shard in shards)
        if numbers not in self._groups:
            self._groups[numbers] = self._own.clone(self._halves.by_name, len(shards))
        clone = self._groups[numbers]
        clone.renew_edges()  # it was made on another stream, perhaps
        with plain_errors(self._device.type):
            clone.buffers.start_shard()
            with span(SpanName.FORWARD):
                loss = self._losses.loss_of(clone.module, shards[0]._replace(X=samples.X, y=samples.y))
            updates = clone.buffers.updates()
            with span(SpanName.BACKWARD):
                found = self._gradients.captured_together(loss.total, clone.edges)
        leaves = []
        for number, (gradients, vector) in enumerate(found):
            of_shard = LossSum(loss.total.stack[number], loss.weight)
            buffers = {name: update[number] for name, update in updates.items()}
            leaves.append(self._checked_leaf(of_shard, gradients, vector, clone, buffers))
        return leaves

    def _captured_leaf(self, shard: Shard) -> Leaf:
        if self._halves is None:
            self._halves = self._half_weights(shard)
        if shard.number not in self._clones:
            self._clones[shard.number] = self._own.clone(self._halves.by_name)
        return self._leaf_of_clone(self._clones[shard.number], shard)

    def _half_weights(self, shard: Shard) -> HalfWeights:
        """Copies of weights in bf16, if this shard has the same gradient with them, bit for bit."""
        none = HalfWeights({})
        if self._spec.precision != "bf16":
            return none
        clone = self._own.clone()
        params = {name: param for name, param in clone.module.named_parameters() if param.requires_grad}
        counter, self._losses.uses_compiled = CastCounter(params), False  # inside compiled code, nothing can be counted
        with counter:
            expected = self._leaf_of_clone(clone, shard)
        names = counter.cast_once()
        if self._spec.compiles:  # it does not round the gradients of vectors to bf16 before it rounds them to float32
            names = [name for name in names if params[name].ndim > 1]
            self._losses.uses_compiled = True
            expected = self._leaf_of_clone(clone, shard)
        halves = HalfWeights({name: params[name] for name in names})
        found = self._leaf_of_clone(self._own.clone(halves.by_name), shard)
        return halves if torch.equal(flat(found.gradient), flat(expected.gradient)) else none

    def _leaf_of_clone(self, clone: ShardModule, shard: Shard) -> Leaf:
        with plain_errors(self._device.type):
            clone.buffers.start_shard()
            with span(SpanName.FORWARD):
                loss = self._captured_forward(clone, shard)
            updates = clone.buffers.updates()
            with span(SpanName.BACKWARD):
                gradients, vector = self._gradients.captured(loss.total, clone.edges)
        return self._checked_leaf(loss, gradients, vector, clone, updates)

    def _checked_leaf(
        self,
        loss: LossSum,
        gradients: list[Tensor | None],
        vector: Tensor | Pieces,
        clone: ShardModule,
        updates: BufferUpdates,
    ) -> Leaf:
        """What can be captured of a shard."""
        if loss.weight is not None:
            raise CaptureError("the loss has weights of its own")
        leaf = self._leaf(loss, gradients, vector, clone, updates)
        if changed := next(filter(None, leaf.buffers), ""):  # "" are running statistics
            raise CaptureError(f"the model changes its buffer {changed}")
        return leaf

    def _captured_forward(self, clone: ShardModule, shard: Shard) -> LossSum:
        """The summed loss of a shard: computed once to see whether it draws random numbers, then captured."""
        if not is_capturing(self._device):
            loss = self._losses.keyed(clone.module, clone.random, shard)
            if clone.random.has_drawn_on_host:
                raise CaptureError("the model draws random numbers on the host")
            return loss
        if not clone.random.has_drawn:
            return self._losses.loss_of(clone.module, shard)
        with clone.random.as_default() if self._spec.compiles else clone.random:  # seeded before every replay
            return self._losses.loss_of(clone.module, shard)
