"""Whether stages compute what the module does: both are run on a few samples, and compared bit for bit.

Stages are what `torch.fx` has seen of a forward method. What it does not see (a question about a type, a value of a
cache, a `forward` or `__call__` of the object's own) would be left out of them without a word.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.errors import first_line
from lockstep.data.dataset import map_leaves
from lockstep.replicas.module_state import call, checksum, modules_in_eval_mode, put_in_mode
from lockstep.replicas.stage_graph import CannotCut
from lockstep.replicas.stage_module import CutModule, StageModule

INSTEAD = "Do what depends on Python objects in a layer of its own, or split the data instead (--split data)"


def check_stages(module: nn.Module, cut: CutModule, X: Any) -> None:
    """Refuses stages that give another output, or leave other buffers, than the module does for the samples X."""
    kind = type(module).__name__
    for is_training, mode in ((True, "training"), (False, "eval")):
        try:
            expected = _computed([_copied(module)], X, module, is_training)
        except Exception:  # the run will say it, with the rank and the line
            return
        try:
            stages = [StageModule(_copied(module), cut, stage) for stage in range(len(cut.names))]
            found = _computed(stages, X, module, is_training)
        except Exception as problem:
            raise CannotCut(
                f"{kind} cannot be cut into stages: in {mode} mode it works as a whole, and in stages it fails "
                f"({first_line(problem)}). {INSTEAD}."
            ) from problem
        if found == expected:
            continue
        if expected != _computed([_copied(module)], X, module, is_training):
            raise CannotCut(
                f"{kind} cannot be cut into stages: in {mode} mode the same samples give something else each time. "
                "What it draws, counts or reads outside of PyTorch would differ between processes. Leave it out."
            )
        raise CannotCut(
            f"{kind} cannot be cut into stages: in {mode} mode they would compute something else than the whole. "
            f"Does its forward method ask for types or for values, or is it, or __call__, replaced? {INSTEAD}."
        )


def _copied(module: nn.Module) -> nn.Module:
    """A copy with the same parameters, and buffers of its own."""
    return copy.deepcopy(module, {id(param): param for param in module.parameters()})


def _computed(parts: Sequence[nn.Module], X: Any, module: nn.Module, is_training: bool) -> list[Any]:
    """What the parts give, one after the other, and the buffers that they leave: as checksums."""
    value = map_leaves(X, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
    with _random_numbers_restored(), torch.set_grad_enabled(is_training):
        torch.manual_seed(0)
        for part in parts:
            held, in_eval_mode = dict(part.named_modules()), modules_in_eval_mode(module)
            put_in_mode(part, is_training, [name for name in in_eval_mode if name in held])
            value = call(part, value)
        buffers = {name: buffer for part in parts for name, buffer in part.named_buffers()}
    return [_summary(value), sorted((name, _summary(buffer)) for name, buffer in buffers.items())]


def _summary(value: Any) -> Any:
    """Something that is equal for equal bits."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        return str(value.dtype), tuple(value.shape), int(checksum(dense)) if dense.numel() else 0
    if isinstance(value, dict):
        return {key: _summary(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [_summary(entry) for entry in value]
    if hasattr(value, "__dict__"):  # a dataclass, say
        return {name: _summary(entry) for name, entry in vars(value).items()}
    return repr(value)


@contextmanager
def _random_numbers_restored() -> Iterator[None]:
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
