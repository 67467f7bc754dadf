"""Blocks that repeat in a model are compiled once, and the code is used for all of them; what is around them is not.

To compile a model of twelve equal blocks as a whole takes ten times as long, and the code is hardly faster.
"""

import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from lockstep.backends.torch import BACKEND

MIN_BLOCKS = 4  # fewer are compiled with the rest of the model

_enabled = threading.local()


def compile_blocks(module: nn.Module) -> bool:
    """Makes the blocks of `module` that repeat compiled ones, within `with_compiled_blocks`; False if none repeat."""
    containers = [part for part in module.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    groups = [[(child, _kind(child)) for child in container.children()] for container in containers]
    blocks = []
    for group in groups:
        counts = Counter(kind for _, kind in group)
        blocks += [child for child, kind in group if counts[kind] >= MIN_BLOCKS and kind[1]]
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _compiled_class(kind)
    return bool(blocks)


def with_compiled_blocks(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with the compiled code of blocks instead of their own."""

    def called(*args: Any) -> Any:
        _enabled.value = True
        try:
            return call(*args)
        finally:
            _enabled.value = False

    return called


def _kind(block: nn.Module) -> tuple[type, tuple[Any, ...]]:
    """What equal blocks have in common."""
    return type(block), tuple((name, tuple(param.shape)) for name, param in block.named_parameters())


@cache
def _compiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a block whose `forward` is compiled code, while that is enabled."""
    compiled = BACKEND.compile(kind.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = compiled if getattr(_enabled, "value", False) else kind.forward
        return function(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
