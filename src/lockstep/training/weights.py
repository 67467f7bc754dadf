"""Weights from a file, checked against the model."""

from pathlib import Path

import numpy as np

from lockstep.core.errors import ConfigError
from lockstep.core.layout import Array


def checked_weights(expected: dict[str, Array], found: dict[str, Array], file: Path, model: str) -> dict[str, Array]:
    """The weights in model order; names, shapes and dtypes must be those of the model."""
    if set(found) != set(expected):
        names = _few(sorted(found)) or "no tensors"
        raise ConfigError(f"{file} has {names}, and {model} needs {_few(list(expected))}. Use the run's own model.")
    for name, array in expected.items():
        needed, has = (f"{each.dtype} of shape {each.shape}" for each in (array, found[name]))
        if has != needed:
            raise ConfigError(f"{file}: {name} is {has}, and {model} needs {needed}. Use the run's own model.")
        if found[name].dtype.kind == "f" and not np.isfinite(found[name]).all() and np.isfinite(array).all():
            raise ConfigError(
                f"{file}: {name} has numbers that are not finite, which no run has saved. Use another file."
            )
    return {name: found[name] for name in expected}


def _few(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
