"""What `torch.fx` does not see in a forward method, and would leave out or freeze: recorded, or refused."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from lockstep.replicas.hidden_state import OF_EVERY_MODULE, PLAIN

# they make tensors of sizes, and of no tensor
MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
          "zeros")  # fmt: skip


@contextmanager
def tensor_makers_recorded(tracer: fx.Tracer) -> Iterator[None]:
    """Within it, this thread's calls of functions like `torch.arange` are recorded instead of made.

    Refuses a method that has drawn random numbers all the same, which tracing would keep for ever.
    """
    thread, made = threading.get_ident(), {name: getattr(torch, name) for name in MAKERS}

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*args, **kwargs)
            return tracer.create_proxy("call_function", function, args, kwargs)

        return call

    before = _random_states()
    try:
        for name, function in made.items():
            setattr(torch, name, recorded(function))
        yield
    finally:
        for name, function in made.items():
            setattr(torch, name, function)
    if _random_states() != before:
        raise ValueError("it draws random numbers which stages would not draw again: do that in a layer of its own")


def _random_states() -> tuple[object, ...]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


def check_hooks(name: str, *hooks: dict[int, Any]) -> None:
    """Refuses hooks that stages would not call."""
    if any(hooks):
        raise ValueError(f"{name or 'it'} has hooks, which stages would not call: register them at layers inside of it")


def settings_of_thread() -> tuple[object, ...]:
    """PyTorch's settings that a `with` statement changes, and tracing does not see."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    kernels = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, *kernels


def check_tensors(module: nn.Module, graph: fx.Graph) -> None:
    """Refuses tensors that came out of nowhere, and buffers that have become another tensor: stages have neither."""
    if any(node.op == "get_attr" and str(node.target).startswith("_tensor_constant") for node in graph.nodes):
        raise ValueError("it uses a tensor that it has not made by a function of torch: make it a buffer")
    for node in graph.nodes:
        if node.op == "get_attr" and not isinstance(used := attribute_of(module, str(node.target)), (Tensor, fx.Proxy)):
            raise ValueError(f"it uses an object of type {type(used).__name__}: do that in a layer of its own")
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if isinstance(buffer, fx.Proxy):
                path = f"{prefix}.{name}" if prefix else name
                raise ValueError(f"it gives the buffer {path} another tensor: write to it in place, like add_(1)")


def attribute_of(module: nn.Module, path: str) -> Any:
    """What a module has at a dotted path."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


class Kept:
    """What a module keeps, to see that tracing its forward method does not change it: stages would not, either."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(name, part, dict(vars(part)), dict(part._buffers)) for name, part in module.named_modules()]
        self._inside = [
            (f"{prefix}.{name}" if prefix else name, value, value.copy())
            for prefix, part, before, _ in self._parts
            for name, value in before.items()
            if name not in OF_EVERY_MODULE and type(value) in (dict, list, set)
        ]
        self._params = [(name, param, param._version) for name, param in module.named_parameters()]

    def check_unchanged(self) -> None:
        """Refuses a module that has changed an attribute or a parameter."""
        for name, param, version in self._params:
            if param._version != version:
                raise ValueError(f"it writes to its parameter {name}, which stages would not: leave that out")
        for prefix, part, before, _ in self._parts:
            for name in {**before, **vars(part)}:
                if name not in OF_EVERY_MODULE and _differs(before.get(name), vars(part).get(name)):
                    path = f"{prefix}.{name}" if prefix else name
                    raise ValueError(f"it changes its attribute {path}, which stages would not: make it a buffer")

        for path, now, before in self._inside:
            if _entries(now) != _entries(before):
                raise ValueError(f"it changes its attribute {path}, which stages would not: make it a buffer")

    def restore(self) -> None:
        """Puts attributes and buffers back."""
        for _, now, before in self._inside:
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)
        for _, part, before, buffers in self._parts:
            vars(part).clear()
            vars(part).update(before)
            part._buffers = buffers


def _entries(container: Any) -> Any:
    """What a dict, list or set holds, to compare by: the objects themselves."""
    if isinstance(container, dict):
        return {key: id(value) for key, value in container.items()}
    return [id(value) for value in container] if isinstance(container, list) else {id(value) for value in container}


def _differs(before: Any, after: Any) -> bool:
    if before is after:
        return False
    return not (isinstance(before, PLAIN) and type(before) is type(after) and before == after)
