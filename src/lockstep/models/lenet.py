"""The text's LeNet, from scratch: 129,068 parameters in eight tensors."""

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.backends import Tensor, backend_of
from lockstep.core.errors import BackendError, ConfigError
from lockstep.core.layout import Array
from lockstep.core.random import keyed_random

SHAPES = {
    "W1": (20, 1, 3, 3),  # 28x28 -> 26x26, pooled to 13x13
    "b1": (20,),
    "W2": (50, 20, 5, 5),  # 13x13 -> 9x9, pooled to 4x4
    "b2": (50,),
    "W3": (800, 128),
    "b3": (128,),
    "W4": (128, 10),
    "b4": (10,),
}
IMAGE = (1, 28, 28)


def init_lenet(seed: int) -> dict[str, Array]:
    """Weights drawn from a normal distribution with standard deviation 0.01, biases 0."""
    random = keyed_random(seed)
    return {
        name: (0.01 * random.standard_normal(shape) if name[0] == "W" else np.zeros(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def lenet(X: Tensor, params: list[Tensor]) -> Tensor:
    """Class scores for images `X` of shape (samples, 1, 28, 28) or (samples, 28, 28), in the framework of `X`.

    >>> lenet(np.ones((3, 1, 28, 28), np.float32), list(init_lenet(seed=0).values())).shape
    (3, 10)
    """
    params = list(params.values()) if isinstance(params, Mapping) else params
    check_one_framework(X, params)
    return lenet_layers(checked_images(X, params), params)


def lenet_layers(X: Tensor, params: list[Tensor]) -> Tensor:
    """The network, without checks."""
    ops = backend_of(X).ops
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = ops.conv_relu_pool2d(X, W1, b1, 2)
    h2 = ops.conv_relu_pool2d(h1, W2, b2, 2)
    h3 = ops.relu(ops.linear(ops.flatten(h2), W3, b3))
    return ops.linear(h3, W4, b4)


def check_one_framework(X: Tensor, params: Sequence[Tensor]) -> None:
    """Refuses parameters that are not in the framework of the samples; the error says how to get them into it."""
    own = backend_of(X).name
    given = [param for param in params if not type(param).__module__.startswith("lockstep.")]  # traced by a backend
    for other in (found for param in given if (found := backend_of(param).name) != own):
        raise BackendError(
            f"X is in {own} and the parameters are in {other}. Copy the parameters into {own}: "
            f'get_params(params, device, backend="{own}").'
        )


def checked_images(X: Tensor, params: list[Tensor]) -> Tensor:
    """`X`, if LeNet can take it with these parameters; images without a channel dimension get one."""
    if len(params) != len(SHAPES):
        raise ConfigError(
            f"lenet takes {len(SHAPES)} parameters ({', '.join(SHAPES)}), and got {len(params)}. "
            f"For a model of your own, name its function: net=..."
        )
    shape = tuple(X.shape)
    if shape[1:] not in (IMAGE, IMAGE[1:]):
        raise ConfigError(
            f"lenet takes images of shape (samples, 1, 28, 28), and got {shape}. Resize them, or use another model."
        )
    if "int" in str(X.dtype):
        raise ConfigError(f"lenet takes images of floats from 0 to 1, and got {X.dtype}. Divide bytes by 255.")
    return X if shape[1:] == IMAGE else X.reshape(len(X), *IMAGE)
