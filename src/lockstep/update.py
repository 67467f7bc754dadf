"""What the mean gradient does to the parameters.

Written with plain operators, one rounding each, so that every framework, layout and chunking gives the same numbers: a
fused multiply-add would round differently in the vectorised part and in the tail of a vector.
"""

from dataclasses import dataclass

from lockstep.backends import Tensor


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent as in the text: parameters - learning rate * mean gradient."""

    learning_rate: float

    def __call__(self, parameters: Tensor, mean_gradient: Tensor) -> Tensor:
        return parameters - self.learning_rate * mean_gradient
