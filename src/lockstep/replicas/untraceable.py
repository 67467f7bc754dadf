"""What `torch.fx` does not see in a forward method, and would leave out or freeze: recorded, or refused."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import fx, nn

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


def check_hooks(module: nn.Module, name: str, *hooks: dict[int, Any]) -> None:
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
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if isinstance(buffer, fx.Proxy):
                path = f"{prefix}.{name}" if prefix else name
                raise ValueError(f"it gives the buffer {path} another tensor: write to it in place, like add_(1)")
