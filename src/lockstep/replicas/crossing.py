"""What crosses a cut, as tensors and the form that they were in, which is plain data.

A tensor that crosses in several places crosses once, so that its gradients are added up as the whole network would.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.backends.torch.strides import copy_with_strides

Form = Any  # the number of a tensor, or a dict with one entry: the kind, and what it is made of
PLAIN = (type(None), bool, int, float, str)
SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "list": list, "size": torch.Size}


class CannotCross(TypeError):
    """Something that cannot be handed to another device."""


def flattened(value: Any) -> tuple[list[Tensor], Form]:
    """The tensors in tuples, lists and dicts, each once, and the form to put them together again.

    >>> X = torch.zeros(1)
    >>> flattened((X, {"again": X, "size": 2}))[1]
    {'tuple': [0, {'dict': [['again', 0], ['size', {'value': 2}]]}]}
    """
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def form_of(part: Any) -> Form:
        if isinstance(part, Tensor):
            if id(part) not in numbers:
                numbers[id(part)] = len(tensors)
                tensors.append(part)
            return numbers[id(part)]
        kind = type(part)
        if kind in PLAIN:
            return {"value": part}
        if kind is dict:
            return {"dict": [[key, form_of(entry)] for key, entry in part.items()]}
        if kind is torch.device:
            return {"device": None}  # that of whoever receives it
        if kind is torch.dtype:
            return {"dtype": str(part).removeprefix("torch.")}
        name = next((name for name, of in SEQUENCES.items() if kind is of), None)
        if name is None and kind.__module__ == "torch.return_types":
            return {"torch": [kind.__name__, [form_of(entry) for entry in part]]}
        if name is None:
            raise CannotCross(
                f"a {kind.__name__} crosses a cut between stages, and only tensors, numbers and plain tuples, lists "
                f"and dicts of them can be handed to another device. Return one of these, or cut elsewhere "
                f"(stages=[...])"
            )
        return {name: [form_of(entry) for entry in part]}

    form = form_of(value)
    return tensors, form


def put_together(tensors: list[Any], form: Form, device: torch.device) -> Any:
    """The value again, on `device`."""
    if isinstance(form, int):
        return tensors[form]
    ((kind, inner),) = form.items()
    if kind in SEQUENCES:
        return SEQUENCES[kind]([put_together(tensors, entry, device) for entry in inner])
    match kind:
        case "value":
            return inner
        case "dict":
            return {key: put_together(tensors, entry, device) for key, entry in inner}
        case "device":
            return device
        case "dtype":
            return getattr(torch, inner)
        case _:
            name, entries = inner
            return getattr(torch.return_types, name)([put_together(tensors, entry, device) for entry in entries])


class Copied(torch.autograd.Function):
    """A copy with the strides of the tensor itself, where it has gaps in memory, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return copy_with_strides(tensor, tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def sharing_memory(tensors: list[Tensor]) -> list[int]:
    """The numbers of those that share memory with another one: what is written to one would be seen in the other."""
    owners: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if (memory := _memory(tensor)) is not None:
            owners.setdefault(memory, []).append(number)
    return [number for numbers in owners.values() if len(numbers) > 1 for number in numbers]


def with_memory_of(tensors: list[Tensor], others: Iterable[Tensor]) -> list[int]:
    """The numbers of those that share memory with one of `others`."""
    theirs = {_memory(other) for other in others} - {None}
    return [number for number, tensor in enumerate(tensors) if _memory(tensor) in theirs]


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None
