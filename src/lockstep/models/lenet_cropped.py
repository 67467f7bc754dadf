"""LeNet without the pixels that no score depends on: what `--model lenet` trains.

Pooling the text's 9x9 images to 4x4 drops one row and column, and with them all that depends on the last two rows and
columns of the input. Without these the convolutions have 15 to 21 % less work, in every framework, and the scores are
the same function of the same images (measured by `python benchmarks/lenet.py`).
"""

from lockstep.backends import Ops, Tensor
from lockstep.models.lenet import IMAGE, checked_images, init_lenet, lenet, lenet_layers
from lockstep.models.model import Forward, Layer, Model

CROP = 26  # of 28 rows and columns


def lenet_cropped(X: Tensor, params: list[Tensor]) -> Tensor:
    """Class scores for images `X` of shape (samples, 1, 28, 28): those of `lenet`, apart from rounding."""
    return lenet_layers(checked_images(X, params)[:, :, :CROP, :CROP], params)


def first_convolution(ops: Ops, X: Tensor, params: list[Tensor]) -> Tensor:
    """Images -> 20 channels of 12x12."""
    weight, bias = params
    return ops.conv_relu_pool2d(X[:, :, :CROP, :CROP], weight, bias, 2)


def second_convolution(ops: Ops, X: Tensor, params: list[Tensor]) -> Tensor:
    """20 channels -> 50 of 4x4."""
    weight, bias = params
    return ops.conv_relu_pool2d(X, weight, bias, 2)


def hidden_layer(ops: Ops, X: Tensor, params: list[Tensor]) -> Tensor:
    """The 800 pixels of all channels -> 128 units."""
    return ops.relu(ops.linear(ops.flatten(X), *params))


def output_layer(ops: Ops, X: Tensor, params: list[Tensor]) -> Tensor:
    """128 units -> scores of ten classes."""
    return ops.linear(X, *params)


LAYERS = (
    Layer("conv1", first_convolution, ("W1", "b1"), (0, 0), cost=20 * 9 * 24 * 24),
    Layer("conv2", second_convolution, ("W2", "b2"), (0, 0), cost=50 * 20 * 25 * 8 * 8),
    Layer("hidden", hidden_layer, ("W3", "b3"), (1, 0), cost=800 * 128),
    Layer("output", output_layer, ("W4", "b4"), (1, 0), cost=128 * 10),
)
lenet_cropped.layers = LAYERS  # type: ignore[attr-defined]
LENET = Model("lenet", init_lenet, lenet_cropped, sample_shape=IMAGE, num_classes=10, layers=LAYERS)


def faster(net: Forward) -> Forward:
    """`lenet_cropped` in place of `lenet`, so that `train_batch` has the speed and the bits of `train`; else `net`."""
    return lenet_cropped if net is lenet else net
