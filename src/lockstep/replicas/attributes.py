"""State that a module keeps outside of parameters and buffers: every rank has its own, so nothing may depend on it."""

from typing import Any

from torch import Tensor, nn

from lockstep.core.errors import RunError


class Attributes:
    """Numbers and tensors that lay in a module's attributes when it was made."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (f"{prefix}.{name}" if prefix else name, owner, name, value, _version(value))
            for prefix, owner in module.named_modules()
            for name, value in vars(owner).items()
            if not name.startswith("_") and name != "training" and isinstance(value, (int, float, Tensor))
        ]

    def check(self) -> None:
        """Refuses a module that has changed one. What was not there, or was None, is no state."""
        for label, owner, name, before, version in self._found:
            now = vars(owner).get(name)
            if isinstance(before, Tensor):
                is_changed = isinstance(now, Tensor) and (now is not before or now._version != version)
            else:
                is_changed = type(now) is type(before) and now != before
            if is_changed:
                raise RunError(
                    f"The model changes its attribute {label} in the forward pass. Every device has one of its own, so "
                    f"the result would depend on their number. Make it a buffer, whose changes are merged: "
                    f"register_buffer({name!r}, ...)."
                )


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0
