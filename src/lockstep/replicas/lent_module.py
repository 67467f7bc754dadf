"""A replica's module in the hands of somebody else: a loss of another model, or the user's own code."""

from torch import Tensor, nn

from lockstep.core.this_thread import THIS_THREAD


class LentModule:
    """Whatever its forward passes write to buffers is dropped: each time it is lent, it has copies of them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own: list[tuple[nn.Module, str, Tensor]] = []  # buffers while it is lent

    def lend(self) -> nn.Module:
        """The module, with new copies: an earlier forward pass may still need its own in the backward pass."""
        self.take_back()
        THIS_THREAD.num_lent += 1
        found = [(owner, n, b) for owner in self._module.modules() for n, b in owner._buffers.items() if b is not None]
        copies = {id(buffer): buffer.detach().clone() for _, _, buffer in found}  # one may be in several modules
        for owner, name, buffer in found:
            owner._buffers[name] = copies[id(buffer)]
        self._own = found
        return self._module

    def take_back(self) -> None:
        """Its buffers are its own again."""
        for owner, name, buffer in self._own:
            owner._buffers[name] = buffer
        self._own = []
