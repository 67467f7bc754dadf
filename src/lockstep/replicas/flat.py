"""A replica of a model that is a function of one flat vector: LeNet in any framework, and the text's functions."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from lockstep.backends import Backend, LossSum, Tensor, flat
from lockstep.core.layout import Array, Layout, sha256_of
from lockstep.models import CrossEntropySum, Forward
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.optim.optimizers import Optimizer, State, clip_factor
from lockstep.partition.placement import Part, owned_ranges
from lockstep.replicas.replica import (
    OF_PARAMETER,
    AllGatherTensors,
    BatchSummary,
    Capturable,
    Evaluated,
    Leaf,
    ReplicaState,
    Shard,
)


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

    def __init__(
        self, spec: FlatTrainSpec, flat: Tensor, state: ReplicaState | None = None, part: Part | None = None
    ) -> None:
        self._spec, self.flat, part = spec, flat, part or Part()
        self._layout = spec.layout
        bounds = [0, *accumulate(self._layout.pieces)][::2]
        self._starts, self._ends = bounds[:-1], bounds[1:]
        sizes = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        numbers = owned_ranges(sizes, part.num_owners)
        self.owned = [range(self._starts[o.start], self._ends[o.stop - 1]) if o else range(0) for o in numbers]
        self.updated, self._numbers = self.owned[part.owner], numbers[part.owner]
        self._state: State = spec.optimizer.start(self._own(flat)) if self.updated else ()
        if state is not None and self.updated:
            self._state = self._restored(state)
        self._loss_sum: LossSum = CrossEntropySum(spec.forward)
        always = spec.backend.capabilities.compiles == "always"
        self._scores = spec.backend.compile(spec.forward) if always else spec.forward
        self._compiled = spec.backend.compile(self._loss_sum) if spec.compiled_sizes and not always else self._loss_sum

    @property
    def entries(self) -> range:
        return range(self._layout.size)

    @property
    def num_parameters(self) -> int:
        """How many are trained."""
        return len(self._layout.names)

    def begin_step(self, step: int) -> None:
        """Nothing to do: shards change no state."""

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        backend, layout, leaves = self._spec.backend, self._layout, []
        for shard in shards:
            loss_sum = self._compiled if shard.num_samples in self._spec.compiled_sizes else self._loss_sum
            loss, gradient = backend.value_and_grad(loss_sum, layout, self.flat, shard.X, shard.y, shard.on_ready)
            leaves.append(Leaf(gradient, loss))
        return leaves

    def update(self, step: int, total: Tensor | None, batch: BatchSummary) -> None:
        if total is None:
            return
        values, state = self._updated(step, total, batch)
        assign = self._spec.backend.assign  # to the same memory, where the framework can: a CUDA graph reads it
        self._state = tuple(map(assign, self._state, state))
        self.set_parameters(self.updated, values)

    def _updated(self, step: int, total: Tensor, batch: BatchSummary) -> tuple[Tensor, State]:
        gradient = total / batch.divisor  # the only division, by all samples
        if self._spec.clip_norm is not None:
            norms = self.gradient_norms(total, batch) if batch.norms is None else batch.norms
            gradient = gradient * clip_factor(norms, self._spec.clip_norm)
        factor = self._spec.lr_schedule.factor(step)
        return self._spec.optimizer(self._own(self.flat), gradient, self._state, step, factor)

    def _own(self, vector: Tensor) -> Tensor:
        """The entries that this rank updates."""
        if self.updated == self.entries:
            return vector
        return self._spec.backend.chunk(vector, self.updated.start, self.updated.stop)

    def gradient_norms(self, total: Tensor | None, batch: BatchSummary) -> dict[str, float]:
        found = {}
        for number in self._numbers if total is not None else ():
            start = self._starts[number] - self.updated.start
            piece = self._spec.backend.chunk(total, start, start + self._ends[number] - self._starts[number])
            mean = piece / batch.divisor
            found[self._layout.names[number]] = float((mean * mean).sum() ** 0.5)
        return found

    def parameters(self, entries: range) -> Tensor:
        backend = self._spec.backend
        values = backend.chunk(self.flat, entries.start, entries.stop)
        return backend.copy_to(values, backend.device_of(self.flat))  # others read it while the next step begins

    def set_parameters(self, entries: range, values: Tensor) -> None:
        backend, start, stop = self._spec.backend, entries.start, entries.stop
        if entries == self.entries:
            self.flat = backend.assign(self.flat, values)
        elif backend.capabilities.writes_in_place:
            backend.assign(backend.chunk(self.flat, start, stop), values)
        else:
            before, after = backend.chunk(self.flat, 0, start), backend.chunk(self.flat, stop, self._layout.size)
            self.flat = backend.concat([part for part in (before, values, after) if len(part)])

    def finish_update(self) -> None:
        """Nothing is left to do."""

    def num_bytes(self) -> dict[str, int]:
        size = 4 * self._layout.size
        return {"parameters": size, "gradient": size, "optimizer": 4 * len(self.updated) * len(self._state)}

    def update_is_static(self, step: int) -> bool:
        spec = self._spec  # the host reads the norm to clip by
        return spec.lr_schedule.is_constant_from(step) and not spec.optimizer.counts_steps and spec.clip_norm is None

    def warm_up_update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        self._updated(step, total, batch)

    def evaluate(self, X: Any, y: Any) -> Evaluated:
        return self._evaluated(self._scores(X, self._spec.backend.unflatten(self._layout, self.flat)), y)

    def _evaluated(self, scores: Tensor, y: Any) -> Evaluated:
        num_correct = float(self._spec.backend.ops.num_correct(scores, y))
        return Evaluated({"accuracy": [num_correct, float(len(y))]})

    def arrays(self) -> dict[str, Array]:
        flat = self._spec.backend.to_numpy(self.flat).copy()  # to_numpy may be a view
        return dict(zip(self._layout.names, self._layout.unflatten(flat), strict=True))

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
        pieces = self._layout.unflatten(self._spec.backend.to_numpy(flat(leaf.gradient)))
        named = {f"the gradient of {name}": piece for name, piece in zip(self._layout.names, pieces, strict=True)}
        found: dict[str, Any] = {name: zlib.crc32(piece.tobytes()) for name, piece in named.items()}
        return {**found, "the loss": float(leaf.loss).hex()}

    def kept_state(self, only_counters: bool = False) -> dict[str, str]:
        return {}

    def changed_state(self, before: dict[str, str], only_counters: bool = False) -> list[str]:
        return []

    def state_dict(self) -> ReplicaState:
        vectors = [self._spec.backend.to_numpy(vector) for vector in self._state]
        units = {}
        for number in self._numbers:
            start, stop = (at - self.updated.start for at in (self._starts[number], self._ends[number]))
            units[f"{OF_PARAMETER}{self._layout.names[number]}"] = [vector[start:stop].copy() for vector in vectors]
        return ReplicaState(units, {"num_vectors": len(vectors)} if self.updated else {})

    def _restored(self, state: ReplicaState) -> State:
        backend, found = self._spec.backend, []
        device = backend.device_of(self.flat)
        own = [state.units[f"{OF_PARAMETER}{self._layout.names[number]}"] for number in self._numbers]
        sizes = [self._ends[number] - self._starts[number] for number in self._numbers]
        if any(
            [v.shape for v in of_param] != [(size,)] * len(self._state)
            for of_param, size in zip(own, sizes, strict=True)
        ):
            raise ValueError("the optimizer's state has other shapes")
        for number in range(len(self._state)):
            vector = np.concatenate([of_param[number] for of_param in own]).astype(np.float32)
            found.append(backend.copy_to(backend.from_numpy(vector, device), device))
        return tuple(found)
