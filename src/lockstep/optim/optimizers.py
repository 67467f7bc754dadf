"""Optimizers of one flat parameter vector, in any framework.

Written with plain operators, one rounding each, so that it does not matter whether a vector is updated whole or in
parts: a fused multiply-add may round differently in the vectorised part of a loop and in its tail.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from lockstep.backends import Tensor

State = tuple[Tensor, ...]  # momentum and the like, kept from step to step
Updated = tuple[Tensor, State]


class Optimizer(Protocol):
    """Parameters and state after step number `step` (from 1 on), with the learning rate multiplied by `factor`."""

    counts_steps: ClassVar[bool]  # whether an update depends on the number of its step

    def start(self, parameters: Tensor) -> State: ...
    def __call__(self, parameters: Tensor, gradient: Tensor, state: State, step: int, factor: float) -> Updated: ...


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent as in the text, parameters - learning rate * mean gradient; or with momentum."""

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    counts_steps: ClassVar[bool] = False

    def start(self, parameters: Tensor) -> State:
        return (parameters * 0,) if self.momentum else ()

    def __call__(self, parameters: Tensor, gradient: Tensor, state: State, step: int, factor: float) -> Updated:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * parameters
        if self.momentum:
            gradient = self.momentum * state[0] + gradient
            state = (gradient,)
        return parameters - self.learning_rate * factor * gradient, state


@dataclass(frozen=True)
class Adam:
    """Adam; `decoupled` weight decay makes it AdamW."""

    learning_rate: float
    weight_decay: float = 0.0
    decoupled: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    counts_steps: ClassVar[bool] = True

    def start(self, parameters: Tensor) -> State:
        return parameters * 0, parameters * 0

    def __call__(self, parameters: Tensor, gradient: Tensor, state: State, step: int, factor: float) -> Updated:
        rate, (mean, square) = self.learning_rate * factor, state
        if self.weight_decay and self.decoupled:
            parameters = parameters * (1 - rate * self.weight_decay)
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * parameters
        mean = self.beta1 * mean + (1 - self.beta1) * gradient
        square = self.beta2 * square + (1 - self.beta2) * (gradient * gradient)
        root = square**0.5 / (1 - self.beta2**step) ** 0.5 + self.epsilon
        return parameters - (rate / (1 - self.beta1**step)) * (mean / root), (mean, square)


# --optimizer NAME -> the optimizer for (learning rate, momentum, weight decay)
OPTIMIZERS: dict[str, Callable[[float, float, float], Optimizer]] = {
    "sgd": Sgd,
    "adam": lambda rate, momentum, decay: Adam(rate, decay),
    "adamw": lambda rate, momentum, decay: Adam(rate, decay, decoupled=True),
}


def clip_factor(norms: Mapping[str, float], clip_norm: float) -> float:
    """What gradients with these norms are multiplied by, so that the norm of all together is at most `clip_norm`.

    From the norms of the parameters, so that it does not matter who has which: they are added with one rounding.
    """
    norm = math.sqrt(math.fsum(norm * norm for norm in norms.values()))
    return min(1.0, clip_norm / (norm + 1e-6))
