"""Checks of the models for images: the shape of a dataset's images, and its labels."""

from lockstep.core.errors import ConfigError
from lockstep.data import Dataset


def image_shape(data: Dataset, model: str, smallest: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of the images; refuses data that is not images with labels."""
    shape = data.sample_shape
    if shape is None or len(shape) != 3:
        has = "several parts" if shape is None else f"the shape {shape}"
        raise ConfigError(f"{model} takes images (channels, height, width), and the samples of {data.name} have {has}.")
    channels, height, width = shape
    if min(height, width) < smallest:
        raise ConfigError(
            f"{model} takes images of {smallest}x{smallest} or more, and those of {data.name} are {height}x{width}."
        )
    check_labels(data, model)
    return channels, height, width


def check_labels(data: Dataset, model: str) -> None:
    """Refuses targets that are not one label for each sample."""
    if isinstance(data.y_train, (tuple, list, dict)) or data.y_train.ndim != 1 or data.num_classes < 1:
        raise ConfigError(f"{model} is a classifier: the targets of {data.name} must be one integer for each sample.")
