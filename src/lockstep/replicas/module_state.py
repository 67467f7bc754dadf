"""A module as a whole: copied, called, loaded, read, compared."""

import copy
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


def modules_in_eval_mode(module: nn.Module) -> list[str]:
    """The submodules of a module in training mode that are not: the user wants them in eval mode, in training too."""
    return [name for name, part in module.named_modules() if not part.training] if module.training else []


def put_in_eval_mode(module: nn.Module, names: list[str]) -> None:
    """Puts these submodules, each for itself, into eval mode."""
    for name in names:
        module.get_submodule(name).training = False


def load(module: nn.Module, weights: dict[str, Array]) -> None:
    """Copies the numbers into the module's parameters and buffers."""
    named = dict([*module.named_parameters(), *module.named_buffers()])
    with torch.no_grad():
        for name, array in weights.items():
            named[name].copy_(torch.from_numpy(array))


def call(module: nn.Module, X: Any) -> Any:
    """What the module gives for X: a tuple is its arguments, a dict its arguments by name."""
    if isinstance(X, dict):
        return module(**X)
    return module(*X) if isinstance(X, (tuple, list)) else module(X)


def arrays_of(module: nn.Module) -> dict[str, Array]:
    """Copies of all parameters and of persistent buffers, by name; what is tied has the first of its names."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: to_numpy(named[name]) for name in names_of(module)}


def names_of(module: nn.Module) -> list[str]:
    """The names of all parameters, and of persistent buffers."""
    kept = set(module.state_dict(keep_vars=True))
    return [name for name, _ in module.named_parameters()] + [n for n, _ in module.named_buffers() if n in kept]


def checksum(tensor: Tensor) -> Tensor:
    """A sum of the tensor's bytes, each with a weight of its own, modulo 2**64: whole numbers have no order."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    octets = torch.nn.functional.pad(octets, (0, -len(octets) % 4))
    words = octets.view(torch.int32).long()
    return (words * (2 * torch.arange(len(words), device=words.device) + 1)).sum()


def to_numpy(tensor: Tensor) -> Array:
    """A copy as an array; numpy has no bfloat16, and float32 holds every one of its numbers."""
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    return array
