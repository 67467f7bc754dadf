"""What the mean gradient does to the parameters.

Written with plain operators, one rounding each, so that it does not matter whether a vector is updated whole or in
parts: a fused multiply-add may round differently in the vectorised part of a loop and in its tail.
"""

from dataclasses import dataclass

from lockstep.backends import Tensor


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent as in the text: parameters - learning rate * mean gradient."""

    learning_rate: float

    def __call__(self, parameters: Tensor, mean_gradient: Tensor) -> Tensor:
        return parameters - self.learning_rate * mean_gradient
