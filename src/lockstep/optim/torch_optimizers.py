"""PyTorch's own optimizers, by name or from a function of the parameters."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.core.entry_points import OWN
from lockstep.core.errors import ConfigError, first_line
from lockstep.core.registry import pick

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class OptimizerSettings(NamedTuple):
    """The settings of an optimizer that is chosen by name."""

    learning_rate: float | None
    momentum: float
    weight_decay: float


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], OptimizerSettings], torch.optim.Optimizer]] = {
    "sgd": lambda params, s: torch.optim.SGD(params, s.learning_rate, s.momentum, weight_decay=s.weight_decay),
    "adam": lambda params, s: torch.optim.Adam(params, s.learning_rate, weight_decay=s.weight_decay),
    "adamw": lambda params, s: torch.optim.AdamW(params, s.learning_rate, weight_decay=s.weight_decay),
}


def named_optimizer(name: str, settings: OptimizerSettings) -> MakeOptimizer:
    """A function of a replica's trainable parameters that makes the optimizer called `name`."""
    make = pick(OPTIMIZERS, name, "optimizer", more=OWN)
    return lambda params: make([param for _, param in params], settings)


def user_optimizer(function: Any) -> MakeOptimizer:
    """The same from a function of the user's own; what it makes is checked."""
    if isinstance(function, torch.optim.Optimizer):
        kind = type(function).__name__
        raise ConfigError(
            f"The optimizer is a {kind} that belongs to your module, and every device has a replica of its own. Give a "
            f"function that makes one: optimizer=lambda params: torch.optim.{kind}(params, ...)."
        )
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"The optimizer is a {kind}. Give a name, or a function of the parameters.")

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        params = [param for _, param in named]
        optimizer = function(named if _wants_names(function) else params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise ConfigError(f"The optimizer's function returned a {kind}. It must return a torch.optim.Optimizer.")
        ours = {id(param) for param in params}
        if any(id(param) not in ours for group in optimizer.param_groups for param in group["params"]):
            raise ConfigError(
                "The function for the optimizer gives it parameters other than those it got: every device has a "
                "replica of its own. Use its argument: optimizer=lambda params: torch.optim.SGD(params, ...)."
            )
        return optimizer

    return make


def check_can_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that does not update parameters from dense gradients alone.

    A step of PyTorch's own is tried, with the smallest parameter of each group; one of the user's own is not called.
    What is tried is not for training.
    """
    kind = type(optimizer)
    try:
        if is_pytorchs(kind.step):
            _try_step(optimizer)
        else:
            inspect.signature(optimizer.step).bind()
    except Exception as problem:
        raise ConfigError(
            f"The optimizer {kind.__name__} cannot be used: {first_line(problem)}. It gets a dense gradient for each "
            f"parameter, and no closure that computes the model again. Use one that needs no more, like "
            f"torch.optim.AdamW."
        ) from problem


def _try_step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group.update({option: False for option in ("fused", "capturable") if option in group})  # for GPUs
        if group["params"]:
            smallest = min(group["params"], key=torch.numel)
            smallest.grad = torch.ones_like(smallest)
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        hooks.clear()  # they are the user's own
    # what they look at initializes CUDA, after which no worker process can be forked
    for check in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        setattr(optimizer, check, lambda: None)
    type(optimizer).step(optimizer)


def is_pytorchs(function: Any) -> bool:
    """Whether a class or function is one of `torch.optim`."""
    return function.__module__.split(".")[:2] == ["torch", "optim"]


def _wants_names(function: Callable[..., Any]) -> bool:
    """Whether an argument is called named_parameters: it gets pairs, as from `module.named_parameters()`."""
    try:
        return "named_parameters" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some classes have no signature
        return False
