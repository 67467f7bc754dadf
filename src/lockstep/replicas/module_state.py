"""A module as a whole: copied, called, loaded, read, compared."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.layout import Array


def copy_of(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the module on a device, without gradients."""
    copied = copy.deepcopy(module).to(device)
    for layer in copied.modules():
        for name, buffer in layer._buffers.items():
            if buffer is not None and 0 in buffer.stride():  # expanded: it could not be written to
                layer._buffers[name] = buffer.contiguous()
    for param in copied.parameters():
        param.grad = None
    return copied


def without_numbers(module: nn.Module) -> nn.Module:
    """A copy with shapes only, on the device `meta`; what is tied stays tied."""
    params = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    buffers = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    return copy.deepcopy(module, {**params, **buffers})


def modules_in_eval_mode(module: nn.Module) -> list[str]:
    """The submodules that the user has put in eval mode, in a module that is in training mode."""
    return [name for name, part in module.named_modules() if not part.training] if module.training else []


def put_in_eval_mode(module: nn.Module, names: list[str]) -> None:
    """Puts these submodules, without those inside them, in eval mode."""
    for name in names:
        module.get_submodule(name).training = False


def put_in_mode(module: nn.Module, is_training: bool, in_eval_mode: list[str]) -> None:
    """As a replica is before it is trained, or evaluated."""
    module.train(is_training)
    if is_training:
        put_in_eval_mode(module, in_eval_mode)


def load(module: nn.Module, weights: dict[str, Array]) -> None:
    """Copies arrays into the module's parameters and buffers."""
    named = dict([*module.named_parameters(), *module.named_buffers()])
    with torch.no_grad():
        for name, tensor in named.items():
            if name in weights:  # others are in another part of the model, or are not saved
                tensor.copy_(torch.from_numpy(weights[name]))


def call(module: nn.Module, X: Any) -> Any:
    """The module's output for X: a tuple is its arguments, a dict its keyword arguments."""
    if isinstance(X, dict):
        return module(**X)
    return module(*X) if isinstance(X, (tuple, list)) else module(X)


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters, then persistent buffers, by name; tied ones under the first of their names."""
    kept = set(module.state_dict(keep_vars=True))
    return dict([*module.named_parameters(), *(named for named in module.named_buffers() if named[0] in kept)])


def arrays_of(module: nn.Module) -> dict[str, Array]:
    """Copies of all parameters and persistent buffers, by name."""
    return {name: to_numpy(tensor) for name, tensor in saved_tensors(module).items()}


class PinnedCopies:
    """Copies of a GPU's tensors in pinned memory of the host, which is allocated once: nobody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, dict[str, Tensor]()
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None  # of the last copy

    def take(self, tensors: dict[str, Tensor]) -> Callable[[], dict[str, Array]]:
        """Copies them as they are after what is under way on the current stream; the arrays are read on demand."""
        self._stream = self._stream or torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                if name not in self._copies:
                    self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._copies[name].copy_(tensor.detach(), non_blocking=True)
        self._event = event = self._stream.record_event()

        def arrays() -> dict[str, Array]:
            event.synchronize()
            return {name: to_numpy(copy) for name, copy in self._copies.items()}

        return arrays

    def wait(self) -> None:
        """What comes next on the current stream may write to the tensors."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether they have finite numbers only."""
    wanted = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    largest = torch._foreach_norm(wanted, float("inf")) if wanted else []
    return not largest or bool(torch.stack([number.isfinite() for number in largest]).all())


def checksum(tensor: Tensor) -> Tensor:
    """A weighted sum of the tensor's bytes modulo 2**64: of integers, so any order of additions gives the same."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    octets = torch.nn.functional.pad(octets, (0, -len(octets) % 4))
    words = octets.view(torch.int32).long()
    return (words * (2 * torch.arange(len(words), device=words.device) + 1)).sum()


def to_numpy(tensor: Tensor) -> Array:
    """A copy as an array; numpy has no bfloat16, and float32 holds all of its values."""
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    return array
