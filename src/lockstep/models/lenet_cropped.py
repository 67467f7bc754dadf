"""LeNet without the pixels that no score depends on: what `--model lenet` trains.

Pooling the text's 9x9 images to 4x4 leaves out one row and column, and with them what only they have seen: the last two
rows and columns of the input. Without them the convolutions have 15 to 21 % less work, in every framework, and the
scores are the same function of the same images (`python benchmarks/lenet.py` says what it brings).
"""

from lockstep.backends import Tensor
from lockstep.models.lenet import IMAGE, checked_images, checked_params, init_lenet, lenet_layers
from lockstep.models.model import Model

SEEN = 26  # of 28 rows and columns


def lenet_cropped(X: Tensor, params: list[Tensor]) -> Tensor:
    """Class scores for images `X` of shape (samples, 1, 28, 28): those of `lenet`, but for rounding."""
    return lenet_layers(checked_images(X)[:, :, :SEEN, :SEEN], checked_params(params))


LENET = Model("lenet", init_lenet, lenet_cropped, sample_shape=IMAGE, num_classes=10)
