"""Sequences of tokens, as language models take them."""

from lockstep.core.errors import ConfigError
from lockstep.data import Dataset


def token_counts(data: Dataset, model: str, multiple_of: int = 1) -> tuple[int, int]:
    """(the number of different tokens, the length of a sequence) of a dataset with a target at every position.

    The number of tokens is rounded up: matrix products are several times slower on a GPU for odd sizes.
    """
    shape = data.sample_shape
    if shape is None or len(shape) != 1 or not data.num_tokens or data.y_train.shape != data.X_train.shape:
        raise ConfigError(
            f"{model} takes sequences of integers (tokens), and as targets the next ones: X and y of shape "
            f"(samples, positions). {data.name} has other data."
        )
    return -(-max(data.num_tokens, data.num_classes) // multiple_of) * multiple_of, shape[0]
