"""A module's side of CUDA graph capture: each shard has a clone of the module, with its own buffers and generator."""

from typing import Any

from torch import Tensor

from lockstep.backends.torch import is_capturing, plain_errors
from lockstep.core.errors import CaptureError
from lockstep.core.random import shard_seed
from lockstep.core.tracing import span
from lockstep.replicas.module import ModuleReplica
from lockstep.replicas.replica import AllGatherTensors, Capturable, Leaf, Shard
from lockstep.replicas.shard_module import ShardModule


class CapturableModuleReplica(ModuleReplica, Capturable):
    """A replica whose shards can be computed side by side, and captured. Its update always runs eagerly."""

    _is_captured = False

    def why_not_capturable(self) -> str:
        return "statistics of the whole batch are exchanged in between (--batch-norm sync)" if self._sync else ""

    def begin_capture(self, step: int) -> None:
        if not self._is_captured:
            self._clones: dict[int, ShardModule] = {}  # by the number of the shard
        if is_capturing(self._device):  # nothing is computed now
            for computed in (self._own, *self._clones.values()):
                computed.buffers.stop_comparing()
        else:
            self._undo_unfinished_step()
        self._is_captured, self._step = True, 0
        self.begin_step(step)

    def begin_replay(self, step: int) -> None:
        for number, clone in self._clones.items():
            clone.random.start(shard_seed(self._spec.seed, step, number))
        self._is_unfinished, self._step = True, step

    def discard_capture(self) -> None:
        self._undo_unfinished_step()
        self._clones = {}
        self._is_captured, self._is_unfinished, self._step = False, False, 0

    def capture_generators(self) -> list[Any]:
        return [clone.random.generator for clone in self._clones.values() if clone.random.has_drawn]

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        if not self._is_captured:
            return super().forward_backward(shards, all_gather)
        return [self._captured_leaf(shard) for shard in shards]

    def _captured_leaf(self, shard: Shard) -> Leaf:
        if shard.number not in self._clones:
            self._clones[shard.number] = self._own.clone()
        clone = self._clones[shard.number]
        with plain_errors(self._device.type):
            clone.buffers.start_shard()
            with span("forward"):
                loss = self._captured_forward(clone, shard)
            with span("backward"):
                gradients, vector = self._gradients.captured(loss, clone.edges)
        leaf = self._leaf(loss, gradients, vector, clone)
        if changed := next(filter(None, leaf.buffers), ""):  # "" are running statistics
            raise CaptureError(f"the model changes its buffer {changed}")
        return leaf

    def _captured_forward(self, clone: ShardModule, shard: Shard) -> Tensor:
        """The summed loss of a shard: computed once to see whether it draws random numbers, then captured."""
        if not self._spec.compiles and not is_capturing(self._device):
            loss = self._keyed_forward(clone.module, clone.random, shard)
            if clone.random.has_drawn_on_host:
                raise CaptureError("the model draws random numbers on the host")
            return loss
        if self._spec.compiles or not clone.random.has_drawn:
            return self._loss_of(clone.module, shard)
        with clone.random:  # seeded by the warm-up, and again before every replay
            return self._loss_of(clone.module, shard)
