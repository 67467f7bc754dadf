"""The text's LeNet, from scratch: 129,068 parameters in eight tensors."""

import numpy as np

from lockstep.backends import Tensor, backend_of
from lockstep.data.order import keyed_random
from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array
from lockstep.models.model import Model

SHAPES = {
    "W1": (20, 1, 3, 3),  # 26x26 -> 24x24, pooled to 12x12
    "b1": (20,),
    "W2": (50, 20, 5, 5),  # 12x12 -> 8x8, pooled to 4x4
    "b2": (50,),
    "W3": (800, 128),
    "b3": (128,),
    "W4": (128, 10),
    "b4": (10,),
}

SEEN = 26  # of 28 rows and columns: pooling 9x9 to 4x4 leaves out one of each, and with it what only it has seen


def init_lenet(seed: int) -> dict[str, Array]:
    """Weights drawn from a normal distribution with standard deviation 0.01, biases 0."""
    random = keyed_random(seed)
    return {
        name: (
            (0.01 * random.standard_normal(shape)).astype(np.float32)
            if name.startswith("W")
            else np.zeros(shape, np.float32)
        )
        for name, shape in SHAPES.items()
    }


def lenet(X: Tensor, params: list[Tensor]) -> Tensor:
    """Class scores for images `X` of shape (samples, 1, 28, 28), in the framework that `X` belongs to.

    >>> lenet(np.ones((3, 1, 28, 28), np.float32), list(init_lenet(seed=0).values())).shape
    (3, 10)
    """
    ops = backend_of(X).ops
    if len(params) != len(SHAPES):
        raise ConfigError(
            f"lenet takes {len(SHAPES)} parameters ({', '.join(SHAPES)}), and got {len(params)}. "
            f"For a model of your own, name its function: net=..."
        )
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    X = X[:, :, :SEEN, :SEEN]
    h1 = ops.conv_relu_pool2d(X, W1, b1, 2)
    h2 = ops.conv_relu_pool2d(h1, W2, b2, 2)
    h3 = ops.relu(ops.linear(ops.flatten(h2), W3, b3))
    return ops.linear(h3, W4, b4)


LENET = Model("lenet", init_lenet, lenet, sample_shape=(1, 28, 28), num_classes=10)
