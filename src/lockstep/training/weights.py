"""Weights from a file, checked against the model that they are for."""

from pathlib import Path

from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array


def checked_weights(expected: dict[str, Array], found: dict[str, Array], file: Path, model: str) -> dict[str, Array]:
    """The weights in model order, once names, shapes and types were found to be the model's."""
    if set(found) != set(expected):
        raise ConfigError(
            f"{file} has {_few(sorted(found)) or 'no tensors'}, and {model} needs {_few(list(expected))}."
        )
    for name, array in expected.items():
        if found[name].shape != array.shape or found[name].dtype != array.dtype:
            raise ConfigError(
                f"{file}: {name} is {found[name].dtype} of shape {found[name].shape}, and "
                f"{model} needs {array.dtype} of shape {array.shape}."
            )
    return {name: found[name] for name in expected}


def _few(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
