"""Which layers of a module have to stay in one piece: somebody else reads their weights, or calls them once more."""

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from lockstep.replicas import module_state


def layers_in_one_piece(module: nn.Module, kinds: tuple[type[nn.Module], ...], X: Any) -> frozenset[str]:
    """The names of layers of these kinds whose weight or bias is read while they are not being called.

    Two forward passes of a copy, for the samples X, show it: `F.linear(X, self.embedding.weight)`, say. Layers whose
    activations are checkpointed are among them: these are called again in mid-backward, where ranks do not meet.
    """
    module, found, inside = copy.deepcopy(module), set[str](), list[nn.Module]()

    def watched(kind: type[nn.Module]) -> type[nn.Module]:
        def reader(name: str) -> Callable[[nn.Module], Any]:
            def read(layer: nn.Module) -> Any:
                if layer not in inside:
                    found.add(names[layer])
                return layer._parameters.get(name)

            return read

        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _is_checkpointed():
                found.add(names[layer])
            inside.append(layer)
            try:
                return kind.forward(layer, *args, **kwargs)
            finally:
                inside.pop()

        members = {name: property(reader(name)) for name in ("weight", "bias")}
        return type(kind.__name__, (kind,), {**members, "forward": forward, "__module__": kind.__module__})

    names = {layer: name for name, layer in module.named_modules() if type(layer) in kinds}
    classes = {kind: watched(kind) for kind in kinds}
    for layer in names:
        layer.__class__ = classes[type(layer)]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        contextlib.suppress(Exception),
    ):  # the run says what is wrong
        warnings.simplefilter("ignore")
        for is_training in (True, False):
            module.train(is_training)
            module_state.call(module, X)
    return frozenset(found)


def _is_checkpointed() -> bool:
    """Whether the layer is called by `torch.utils.checkpoint`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
