"""The state of an optimizer and a scheduler as plain values and arrays, and back: to the bit, without pickle."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import RunError
from lockstep.replicas.module_state import to_numpy

TENSOR, COUNTER = "tensor", "counter"  # a dict with one of these as its "is" stands for such a thing


def optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    """Its state dict, all that the next step depends on, as plain values and arrays."""
    return _plain(optimizer.state_dict(), "optimizer", type(optimizer).__name__)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Any, device: torch.device) -> None:
    """Makes a new optimizer equal to the one that `optimizer_state` read."""
    saved = _restored(state, device)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(saved)
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if [len(group["params"]) for group in saved["param_groups"]] != [
        len(group["params"]) for group in optimizer.param_groups
    ]:
        raise ValueError("the optimizer has other groups of parameters")
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({name: value for name, value in values.items() if name != "params"})
    for number, entries in saved["state"].items():  # by hand: PyTorch's own way rounds what is more exact than float32
        optimizer.state[params[number]] = {
            name: entry.to(device) if isinstance(entry, Tensor) and name != "step" else entry
            for name, entry in entries.items()
        }


def scheduler_state(scheduler: Any) -> Any:
    """The same of the scheduler; None without one."""
    return None if scheduler is None else _plain(scheduler.state_dict(), "scheduler", type(scheduler).__name__)


def restore_scheduler(scheduler: Any, state: Any, device: torch.device) -> None:
    """Makes a new scheduler equal to the one that `scheduler_state` read."""
    if (scheduler is None) != (state is None):
        raise ValueError("one has a scheduler, the other has none")
    if scheduler is not None:
        saved = _restored(state, device)
        if set(saved) != set(scheduler.state_dict()):
            raise ValueError("the scheduler is another")
        scheduler.load_state_dict(saved)


def _plain(value: Any, path: str, owner: str) -> Any:
    match value:
        case Tensor():
            on = "cpu" if value.device.type == "cpu" else "device"
            return {"is": TENSOR, "kind": str(value.dtype).removeprefix("torch."), "on": on, "array": to_numpy(value)}
        case Counter():
            return {"is": COUNTER, "counts": dict(value)}
        case dict():
            return {key: _plain(entry, f"{path}.{key}", owner) for key, entry in value.items()}
        case list() | tuple():
            entries = [_plain(entry, f"{path}.{number}", owner) for number, entry in enumerate(value)]
            return entries if isinstance(value, list) else tuple(entries)
        case None | bool() | int() | float() | str():
            return value
    raise RunError(
        f"The {owner} keeps a {type(value).__name__} as {path}, which a checkpoint cannot hold: only numbers, strings, "
        f"tensors, and lists and dicts of them. Train without checkpoints (--checkpoint-every 0), or keep it elsewhere."
    )


def _restored(plain: Any, device: torch.device) -> Any:
    match plain:
        case {"is": "tensor", "kind": kind, "on": on, "array": array}:
            dtype = getattr(torch, kind)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{kind} is not a kind of number")
            return torch.from_numpy(array.copy()).to(device if on == "device" else "cpu", dtype)
        case {"is": "counter", "counts": counts}:
            return Counter(counts)
        case dict():
            return {key: _restored(entry, device) for key, entry in plain.items()}
        case list() | tuple():
            entries = [_restored(entry, device) for entry in plain]
            return entries if isinstance(plain, list) else tuple(entries)
        case _:
            return plain
