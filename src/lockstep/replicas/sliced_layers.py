"""Layers that are computed as fixed slices of their output units, whoever computes them (`parallel/tensor.py`).

A slice of a layer is a parameter of its own, called `[1/4]weight`. Its output is computed by itself, and all slices are
concatenated. PyTorch's graph is cut at every sliced layer: backward brings the gradient of the concatenated output, and
from there on the slices' gradients are computed one by one, those of the input are added in the tree over slice
numbers, and backward continues before the layer. So nothing waits inside PyTorch's own backward threads, which the
ranks of one GPU share.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from lockstep.core.errors import RunError
from lockstep.parallel.tensor import LayerShare, layer_shares, slice_name
from lockstep.partition.batch import even_ranges
from lockstep.replicas.keyed_random import KeyedRandom, NoDraws
from lockstep.replicas.module_state import without_numbers
from lockstep.replicas.replica import AllGatherTensors
from lockstep.schedules.reduction_tree import Node, sum_of

LOCAL = threading.local()  # .context: the `SliceContext` of the calling thread
Compute = Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]  # (layer, X, weight, bias) -> output of a slice


class Kind(NamedTuple):
    """How a kind of layer is sliced."""

    units: int  # the dimension of the weight that has the output units
    outputs: int  # the dimension of the output that has them
    compute: Compute


def _embedding(layer: Any, X: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.embedding(X, weight, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq)


KINDS = {
    nn.Linear: Kind(0, -1, lambda layer, X, weight, bias: F.linear(X, weight, bias)),
    nn.Conv2d: Kind(0, -3, lambda layer, X, weight, bias: layer._conv_forward(X, weight, bias)),
    nn.Embedding: Kind(1, -1, _embedding),
}


class SlicedCall(NamedTuple):
    """One call of a sliced layer: what its backward pass needs."""

    name: str
    dim: int  # of the output, that has the units
    share: LayerShare
    params: list[tuple[Tensor, ...]]  # weight and bias of each slice of this rank
    X: Tensor  # the input, without what it came from
    edge: Any  # where the gradient of the input continues; None: nowhere
    outputs: list[Tensor]  # of this rank's slices
    widths: list[int]  # of all slices
    arrived: "list[Tensor]"  # the gradient of the concatenated output, once it is there


class SliceContext:
    """The calls of sliced layers in one forward pass, and the ranks that share them."""

    def __init__(self, all_gather: AllGatherTensors) -> None:
        self.all_gather, self.calls = all_gather, list[SlicedCall]()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within it, the calling thread's sliced layers are computed with these ranks."""
        LOCAL.context = self
        try:
            yield
        finally:
            del LOCAL.context

    def backward(self, after_pass: Callable[[], None], random: KeyedRandom | None = None) -> None:
        """Continues a backward pass from the outputs of sliced layers, the last of them first.

        Activation checkpointing of other layers draws from `random` again.
        """
        for call in reversed(self.calls):
            if call.arrived:
                with NoDraws(random):
                    _backward(call, self.all_gather)
                after_pass()
        self.calls.clear()


class _Concatenate(torch.autograd.Function):
    """The outputs of all slices; the gradient ends here."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, arrived: list[Tensor], dim: int, *outputs: Tensor) -> Tensor:
        ctx.arrived, ctx.num_outputs = arrived, len(outputs)
        return torch.cat(outputs, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        before: list[Tensor] = ctx.arrived
        before[:] = [before[0] + gradients[0] if before else gradients[0]]  # it may come in several parts
        return (None,) * (3 + ctx.num_outputs)


def slice_layers(
    module: nn.Module, num_slices: int, number: int, num_ranks: int, in_one_piece: frozenset[str] = frozenset()
) -> None:
    """Makes all layers of `module` that can be sliced into slices, of which it keeps those of one rank."""
    named = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    places = Counter(id(layer) for _, layer in module.named_modules(remove_duplicate=False))
    for name, layer in module.named_modules():
        own = [param for param in layer._parameters.values() if param is not None]
        is_tied = any(named[id(param)] > places[id(layer)] for param in own)
        if can_be_sliced(layer) and not is_tied and name not in in_one_piece:
            _slice(name, layer, num_slices, number, num_ranks)


def can_be_sliced(layer: nn.Module) -> bool:
    """Whether a layer is one whose output units can be computed apart."""
    if type(layer) not in KINDS or layer._parameters.get("weight") is None:
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.sparse
    return not isinstance(layer, nn.Conv2d) or layer.groups == 1


def _slice(name: str, layer: nn.Module, num_slices: int, number: int, num_ranks: int) -> None:
    kind, weight, bias = KINDS[type(layer)], layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None, "checked before"
    units = even_ranges(weight.shape[kind.units], min(num_slices, weight.shape[kind.units]))
    share = layer_shares(len(units), num_ranks)[number]
    for short, whole, dim in (("weight", weight, kind.units), ("bias", bias, 0)):
        layer._parameters.pop(short, None)
        if whole is not None:
            for at in share.slices:
                part = whole.detach().narrow(dim, units[at].start, len(units[at])).clone()
                layer.register_parameter(slice_name(short, at, len(units)), nn.Parameter(part, whole.requires_grad))
    layer.lockstep_slices = name, share, [len(unit) for unit in units], bias is not None
    layer.__class__ = _sliced_class(type(layer))


def slices_of(
    module: nn.Module, num_slices: int, in_one_piece: frozenset[str]
) -> dict[str, tuple[list[str], list[int], int]]:
    """For each parameter that is sliced, in model order: the names of its slices, their sizes, and the dimension."""
    found = {}
    whole = without_numbers(module)
    slice_layers(whole, num_slices, 0, 1, in_one_piece)
    for name, layer in whole.named_modules():
        if hasattr(layer, "lockstep_slices"):
            _, _, widths, has_bias = layer.lockstep_slices
            dims = {"weight": KINDS[type(layer).__mro__[1]].units, **({"bias": 0} if has_bias else {})}
            for short, dim in dims.items():
                prefix = f"{name}.{short}" if name else short
                names = [slice_name(prefix, number, len(widths)) for number in range(len(widths))]
                found[prefix] = names, widths, dim
    return found


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _sliced_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of sliced layers of a kind; whoever reads their weight is told that it is in slices."""
    if kind not in _CLASSES:
        members = {"forward": _forward, "weight": property(_refuse), "bias": property(_refuse)}
        _CLASSES[kind] = type(f"Sliced{kind.__name__}", (kind,), {**members, "__module__": kind.__module__})
    return _CLASSES[kind]


def _refuse(layer: Any) -> Any:
    raise RunError(
        f"The model reads the weight or bias of {layer.lockstep_slices[0]}, which is in slices, instead of calling the "
        f"layer. Call it, or train without --slices."
    )


def _params_of(layer: Any) -> list[tuple[Tensor, ...]]:
    _, share, widths, has_bias = layer.lockstep_slices
    names = ("weight", "bias") if has_bias else ("weight",)
    return [tuple(layer._parameters[slice_name(n, at, len(widths))] for n in names) for at in share.slices]


def _forward(layer: Any, X: Tensor) -> Tensor:
    """The output of a sliced layer: this rank's slices, and those of the others."""
    context: SliceContext | None = getattr(LOCAL, "context", None)
    name, share, widths, _ = layer.lockstep_slices
    if context is None:
        raise RunError(
            f"{name} is computed outside of a forward pass of the run (activation checkpointing?), where the ranks "
            f"that share its slices do not meet. Leave sliced layers out of that, or train without --slices."
        )
    kind, params = KINDS[type(layer).__mro__[1]], _params_of(layer)
    needs_grad = torch.is_grad_enabled()
    inputs = X.detach().requires_grad_(needs_grad and X.requires_grad) if X.is_floating_point() else X
    outputs = [kind.compute(layer, inputs, own[0], own[1] if len(own) > 1 else None) for own in params]
    gathered = context.all_gather(name, [output.detach() for output in outputs])
    if not needs_grad:
        return torch.cat(gathered, kind.outputs)
    arrived: list[Tensor] = []
    edge = get_gradient_edge(X) if X.requires_grad else None
    context.calls.append(SlicedCall(name, kind.outputs, share, params, inputs, edge, outputs, widths, arrived))
    start = torch.zeros((), device=X.device, requires_grad=True)
    result: Tensor = _Concatenate.apply(start, arrived, kind.outputs, *gathered)
    return result


def _backward(call: SlicedCall, all_gather: AllGatherTensors) -> None:
    """Gradients of this rank's slices; the gradient of the input, and whatever comes before it."""
    needs_X = call.edge is not None
    pieces = call.arrived[0].split(call.widths, call.dim)
    format_ = torch.channels_last if _is_channels_last(call.arrived[0]) else torch.contiguous_format
    found: dict[Node, Tensor] = {}

    def leaf(at: int) -> Tensor | None:
        own = at - call.share.slices.start
        wanted = [*([call.X] if needs_X else []), *(param for param in call.params[own] if param.requires_grad)]
        if not wanted:
            return None
        gradients = torch.autograd.grad(call.outputs[own], wanted, pieces[at].contiguous(memory_format=format_))
        for param, gradient in zip(wanted[needs_X:], gradients[needs_X:], strict=True):
            param.grad = gradient if param.grad is None else param.grad + gradient
        return gradients[0] if needs_X else None

    for node in call.share.nodes:
        total = sum_of(node, leaf, lambda left, right: None if left is None or right is None else left + right)
        if total is not None:
            found[node] = total
    if not needs_X:
        return
    shares = layer_shares(len(call.widths), call.share.num_ranks)
    gathered = all_gather(f"the backward pass of {call.name}", [found[node] for node in call.share.nodes])
    nodes = dict(zip([node for share in shares for node in share.nodes], gathered, strict=True))
    for node, left, right in call.share.sums:
        nodes[node] = nodes[left] + nodes[right]
    torch.autograd.backward(call.edge, nodes[Node(0, len(call.widths))], retain_graph=True)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
