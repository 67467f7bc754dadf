"""The state of an optimizer and a scheduler as plain values and arrays, and back: bit for bit, without pickle.

A tensor or a counter becomes a dict whose key "is" says so.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError, RunError
from lockstep.replicas.module_state import to_numpy

NOT_STATE = ("params", "fused", "foreach", "capturable")  # the last three are how a kind of device computes the update
SAME = "Resume with the same optimizer and scheduler, or start another run in another folder (--out)."


def optimizer_state(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """The state dicts of the optimizer and of the scheduler (None without one), as plain values and arrays."""
    return {
        name: None if owner is None else _plain(owner.state_dict(), name, type(owner).__name__)
        for name, owner in (("optimizer", optimizer), ("scheduler", scheduler))
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: Any, state: dict[str, Any], device: torch.device
) -> None:
    """Makes a new optimizer and a new scheduler equal to those that `optimizer_state` read."""
    if (scheduler is None) != (state["scheduler"] is None):
        raise ConfigError(f"The checkpoint was saved {'without' if scheduler else 'with'} a scheduler. {SAME}")
    saved = _restored(state["optimizer"], device)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(saved)
    else:
        _load_exactly(optimizer, saved, device)
    if scheduler is not None:
        saved = _restored(state["scheduler"], device)
        if set(saved) != set(scheduler.state_dict()):
            raise ConfigError(f"The checkpoint was saved with another scheduler. {SAME}")
        scheduler.load_state_dict(saved)


def _load_exactly(optimizer: torch.optim.Optimizer, saved: dict[str, Any], device: torch.device) -> None:
    """Like `load_state_dict`, which would round float64 state to float32."""
    groups = optimizer.param_groups
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group["params"]) for group in groups]:
        raise ConfigError(f"The checkpoint's optimizer has other groups of parameters. {SAME}")
    for group, values in zip(groups, saved["param_groups"], strict=True):
        group.update({name: value for name, value in values.items() if name not in NOT_STATE})
    params = [param for group in groups for param in group["params"]]
    for number, entries in saved["state"].items():
        optimizer.state[params[number]] = {
            name: entry.to(device) if isinstance(entry, Tensor) and name != "step" else entry
            for name, entry in entries.items()
        }


def _plain(value: Any, path: str, owner: str) -> Any:
    match value:
        case Tensor():
            on = "cpu" if value.device.type == "cpu" else "device"
            return {"is": "tensor", "kind": str(value.dtype).removeprefix("torch."), "on": on, "array": to_numpy(value)}
        case Counter():
            return {"is": "counter", "counts": dict(value)}
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
                raise ValueError(f"{kind} is not a dtype")
            return torch.from_numpy(array.copy()).to(device if on == "device" else "cpu", dtype)
        case {"is": "counter", "counts": counts}:
            return Counter(counts)
        case dict():
            return {key: _restored(entry, device) for key, entry in plain.items()}
        case list() | tuple():
            return type(plain)(_restored(entry, device) for entry in plain)
        case _:
            return plain
