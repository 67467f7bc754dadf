"""A replica's module in the hands of somebody else: a loss of another model, or the user's own code."""

from collections.abc import Iterator

from torch import Tensor, nn

from lockstep.core.errors import RunError
from lockstep.core.this_thread import THIS_THREAD


class LentModule:
    """Whatever its forward passes write to buffers is dropped: each time it is lent, it has copies of them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own: list[tuple[nn.Module, str, Tensor]] = []  # buffers while it is lent
        self._params: list[tuple[str, Tensor, int]] = []  # parameters when it was lent
        self._numbers: dict[str, object] = {}

    def lend(self) -> nn.Module:
        """The module, with new copies: an earlier forward pass may still need its own in the backward pass."""
        self.take_back()
        THIS_THREAD.num_lent += 1
        found = [(owner, n, b) for owner in self._module.modules() for n, b in owner._buffers.items() if b is not None]
        copies = {id(buffer): buffer.detach().clone() for _, _, buffer in found}  # one may be in several modules
        for owner, name, buffer in found:
            owner._buffers[name] = copies[id(buffer)]
        self._own = found
        self._params = [(name, param, param._version) for name, param in self._module.named_parameters()]
        self._numbers = dict(_numbers(self._module))
        return self._module

    def take_back(self) -> None:
        """Its buffers are its own again."""
        for owner, name, buffer in self._own:
            owner._buffers[name] = buffer
        params, numbers = self._params, self._numbers
        self._own, self._params, self._numbers = [], [], {}
        changed = [name for name, param, version in params if param._version != version]
        changed += [path for path, value in _numbers(self._module) if path in numbers and numbers[path] != value]
        if changed:
            raise RunError(
                f"trainer.module was changed between steps ({changed[0]}): it is the replica of one device, and the "
                f"others stay as they are. Use trainer.apply(function): it is called with the module of each device."
            )


def _numbers(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The attributes that are plain numbers and texts, like the probability of a dropout layer."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_") and name != "training" and isinstance(value, (int, float, str)):
                yield f"{prefix}.{name}" if prefix else name, value
