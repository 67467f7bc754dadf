"""A replica of a model that is a function of one flat vector: LeNet in any framework, and the text's functions."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from lockstep.backends import Backend, LossSum, Tensor, flat
from lockstep.core.layout import Array, Layout, sha256_of
from lockstep.models import CrossEntropySum, Forward
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.optim.optimizers import Optimizer, State, clipped
from lockstep.replicas.replica import AllGatherTensors, BatchSummary, Capturable, Leaf, Measured, Shard


@dataclass(frozen=True)
class FlatTrainSpec:
    """How a flat vector is trained: the same for all ranks."""

    backend: Backend
    forward: Forward
    layout: Layout
    optimizer: Optimizer
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    clip_norm: float | None = None
    compiled_sizes: frozenset[int] = frozenset()  # shards with so many samples are compiled; others are not worth it


class FlatReplica(Capturable):
    """One rank's parameters as one flat vector. Every framework can train it: nothing is changed in place."""

    def __init__(self, spec: FlatTrainSpec, flat: Tensor, state_dict: Any = None) -> None:
        self._spec, self.flat = spec, flat
        self._state: State = spec.optimizer.start(flat)
        if state_dict is not None:
            self._state = self._restored(state_dict)
        self._loss_sum: LossSum = CrossEntropySum(spec.forward)
        always = spec.backend.capabilities.compiles == "always"
        self._scores = spec.backend.compile(spec.forward) if always else spec.forward
        self._compiled = spec.backend.compile(self._loss_sum) if spec.compiled_sizes and not always else self._loss_sum

    @property
    def entries(self) -> range:
        return range(self._spec.layout.size)

    def begin_step(self, step: int) -> None:
        """Nothing to do: shards change no state."""

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        backend, layout, leaves = self._spec.backend, self._spec.layout, []
        for shard in shards:
            loss_sum = self._compiled if shard.num_samples in self._spec.compiled_sizes else self._loss_sum
            loss, gradient = backend.value_and_grad(loss_sum, layout, self.flat, shard.X, shard.y, shard.on_ready)
            leaves.append(Leaf(gradient, loss))
        return leaves

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        flat, state = self._updated(step, total, batch)
        assign = self._spec.backend.assign  # to the same memory, where the framework can: a CUDA graph reads it
        self.flat, self._state = assign(self.flat, flat), tuple(map(assign, self._state, state))

    def _updated(self, step: int, total: Tensor, batch: BatchSummary) -> tuple[Tensor, State]:
        gradient = clipped(total / batch.divisor, self._spec.clip_norm)  # the only division, by all samples
        return self._spec.optimizer(self.flat, gradient, self._state, step, self._spec.lr_schedule.factor(step))

    def update_is_static(self, step: int) -> bool:
        spec = self._spec  # the host reads the norm to clip by
        return spec.lr_schedule.is_constant_from(step) and not spec.optimizer.counts_steps and spec.clip_norm is None

    def warm_up_update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        self._updated(step, total, batch)

    def measure(self, X: Any, y: Any) -> Measured:
        backend = self._spec.backend
        scores = self._scores(X, backend.unflatten(self._spec.layout, self.flat))
        return Measured({"accuracy": [float(backend.ops.num_correct(scores, y)), float(len(y))]})

    def arrays(self) -> dict[str, Array]:
        layout = self._spec.layout
        flat = self._spec.backend.to_numpy(self.flat).copy()  # to_numpy may be a view
        return dict(zip(layout.names, layout.unflatten(flat), strict=True))

    def snapshot(self) -> Callable[[], dict[str, Array]]:
        return partial(dict, self.arrays())

    def is_finite(self) -> bool:
        return bool(np.isfinite(self._spec.backend.to_numpy(self.flat)).all())

    def fingerprints(self) -> dict[str, str]:
        return {name: sha256_of([array]) for name, array in self.arrays().items()}

    def averaged(self) -> dict[str, Array]:
        return {}

    def undo_step(self) -> None:
        """Shards change no state."""

    def digest(self, leaf: Leaf) -> dict[str, Any]:
        backend, layout = self._spec.backend, self._spec.layout
        pieces = layout.unflatten(backend.to_numpy(flat(leaf.gradient)))
        named = {f"the gradient of {name}": piece for name, piece in zip(layout.names, pieces, strict=True)}
        found: dict[str, Any] = {name: zlib.crc32(piece.tobytes()) for name, piece in named.items()}
        return {**found, "the loss": float(leaf.loss).hex()}

    def kept_state(self, only_counters: bool = False) -> dict[str, str]:
        return {}

    def changed_state(self, before: dict[str, str], only_counters: bool = False) -> list[str]:
        return []

    def state_dict(self) -> Any:
        return {"optimizer": [self._spec.backend.to_numpy(vector).copy() for vector in self._state]}

    def _restored(self, state_dict: Any) -> State:
        backend, vectors = self._spec.backend, state_dict["optimizer"]
        expected = [(tuple(vector.shape), np.dtype(np.float32)) for vector in self._state]
        if [(vector.shape, vector.dtype) for vector in vectors] != expected:
            raise ValueError("the optimizer's state has other shapes")
        device = backend.device_of(self.flat)
        return tuple(backend.copy_to(backend.from_numpy(vector, device), device) for vector in vectors)
