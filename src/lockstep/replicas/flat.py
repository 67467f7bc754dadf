"""A replica of a model that is a function of one flat vector: LeNet in any framework, and the text's functions."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.backends import Backend, LossSum, Tensor
from lockstep.runtime import Gathered, Leaf, Meet, Shard
from lockstep.core.layout import Array, Layout, sha256_of
from lockstep.models import CrossEntropySum, Forward
from lockstep.optim.lr_schedule import Rates
from lockstep.optim.optimizers import Rule, State, clipped


@dataclass(frozen=True)
class FlatRecipe:
    """How a flat vector is trained: the same for all ranks."""

    backend: Backend
    forward: Forward
    layout: Layout
    rule: Rule
    rates: Rates = field(default_factory=Rates)
    clip_norm: float | None = None
    compiles: bool = False  # the model is made into code of its own


class FlatReplica:
    """One rank's parameters as one flat vector. Every framework can train it: nothing is changed in place."""

    def __init__(self, recipe: FlatRecipe, flat: Tensor, memory: Any = None) -> None:
        self._recipe, self.flat = recipe, flat
        self._state: State = recipe.rule.start(flat)
        if memory is not None:
            self._state = self._restored(memory)
        self._loss_sum: LossSum = CrossEntropySum(recipe.forward)
        self._scores = recipe.forward
        captures = recipe.backend.capabilities.capture
        if recipe.compiles or captures == "always":
            self._scores = recipe.backend.capture(self._scores)
        if recipe.compiles and captures != "always":
            self._loss_sum = recipe.backend.capture(self._loss_sum)

    @property
    def size(self) -> int:
        return self._recipe.layout.size

    def leaves(self, step: int, shards: Iterator[Shard], meet: Meet) -> Iterator[Leaf]:
        backend, layout = self._recipe.backend, self._recipe.layout
        for shard in shards:
            loss, gradient = backend.value_and_grad(self._loss_sum, layout, self.flat, shard.X, shard.y, shard.ready)
            yield Leaf(gradient, loss)

    def update(self, step: int, total: Tensor, batch: Gathered) -> None:
        flat, state = self._updated(step, total, batch)
        assign = self._recipe.backend.assign  # the same memory, where the framework can: a recording reads from there
        self.flat, self._state = assign(self.flat, flat), tuple(map(assign, self._state, state))

    def _updated(self, step: int, total: Tensor, batch: Gathered) -> tuple[Tensor, State]:
        gradient = clipped(total / batch.num_samples, self._recipe.clip_norm)  # the only division, by all samples
        return self._recipe.rule(self.flat, gradient, self._state, step, self._recipe.rates.factor(step))

    def repeats_update(self, step: int) -> bool:
        recipe = self._recipe  # a norm is read by the host
        return recipe.rates.stays(step) and not recipe.rule.counts_steps and recipe.clip_norm is None

    def rehearse_update(self, step: int, total: Tensor, batch: Gathered) -> None:
        self._updated(step, total, batch)

    def measure(self, X: Any, y: Any) -> dict[str, float]:
        backend = self._recipe.backend
        scores = self._scores(X, backend.unflatten(self._recipe.layout, self.flat))
        return {"accuracy": float(backend.ops.num_correct(scores, y))}

    def arrays(self) -> dict[str, Array]:
        layout = self._recipe.layout
        flat = self._recipe.backend.to_numpy(self.flat).copy()  # a backend may show its own memory
        return dict(zip(layout.names, layout.unflatten(flat), strict=True))

    def fingerprints(self) -> list[str]:
        return [sha256_of([array]) for array in self.arrays().values()]

    def recordable(self) -> str:
        return ""

    def record(self, step: int) -> None:
        """A shard leaves nothing behind in it."""

    def replay(self, step: int) -> None:
        """It has nothing that depends on the step."""

    def forget(self) -> None:
        """It remembers nothing of a step that was not updated."""

    def generators(self) -> list[Any]:
        return []

    def memory(self) -> Any:
        return {"optimizer": [self._recipe.backend.to_numpy(vector).copy() for vector in self._state]}

    def _restored(self, memory: Any) -> State:
        """What the rule remembers, from what `memory` gave."""
        backend, vectors = self._recipe.backend, memory["optimizer"]
        expected = [(tuple(vector.shape), np.dtype(np.float32)) for vector in self._state]
        if [(vector.shape, vector.dtype) for vector in vectors] != expected:
            raise ValueError("the optimizer's memory has other shapes")
        device = backend.device_of(self.flat)
        return tuple(backend.copy_to(backend.from_numpy(vector, device), device) for vector in vectors)
