"""The state of an optimizer and a scheduler as plain values and arrays, and back: bit for bit, without pickle.

An optimizer's state is kept for each parameter by its name, so a run can continue with its parameters on other ranks.
A tensor or a counter becomes a dict whose key "is" says so.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError, RunError
from lockstep.replicas.module_state import to_numpy
from lockstep.replicas.replica import OF_PARAMETER, ReplicaState

NOT_STATE = ("params", "fused", "foreach", "capturable")  # the last three are how a kind of device computes the update
SAME = "Resume with the same optimizer and scheduler, or start another run in another folder (--out)."


def optimizer_state(optimizer: torch.optim.Optimizer, scheduler: Any, names: dict[int, str]) -> ReplicaState:
    """The state of each parameter, and what they have in common; `names` are those of parameters, by their ids."""
    common: dict[str, Any] = {"scheduler": None if scheduler is None else _plain_of(scheduler, "scheduler")}
    if _loads_itself(optimizer):
        return ReplicaState({}, {**common, "optimizer": _plain_of(optimizer, "optimizer")})
    kind, groups, units = type(optimizer).__name__, [], {}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in NOT_STATE}
        groups.append(_plain(options, "optimizer", kind))
        for param in group["params"]:
            state = {"group": number, "state": _plain(dict(optimizer.state.get(param, {})), "optimizer", kind)}
            units[f"{OF_PARAMETER}{names[id(param)]}"] = state
    return ReplicaState(units, {**common, "groups": groups})


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    state: ReplicaState,
    names: dict[int, str],
    device: torch.device,
) -> None:
    """Makes a new optimizer and a new scheduler equal to those that `optimizer_state` read."""
    common = state.common
    if (scheduler is None) != (common["scheduler"] is None):
        raise ConfigError(f"The checkpoint was saved {'without' if scheduler else 'with'} a scheduler. {SAME}")
    if _loads_itself(optimizer) != ("optimizer" in common):
        raise ConfigError(f"The checkpoint was saved with another optimizer. {SAME}")
    if "optimizer" in common:
        optimizer.load_state_dict(_restored(common["optimizer"], device))
    else:
        _load_exactly(optimizer, state, names, device)
    if scheduler is not None:
        saved = _restored(common["scheduler"], device)
        if set(saved) != set(scheduler.state_dict()):
            raise ConfigError(f"The checkpoint was saved with another scheduler. {SAME}")
        scheduler.load_state_dict(saved)


def _loads_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class has a state of its own, which is not by parameter."""
    kind, base = type(optimizer), torch.optim.Optimizer
    return kind.load_state_dict is not base.load_state_dict or kind.state_dict is not base.state_dict


def _load_exactly(
    optimizer: torch.optim.Optimizer, saved: ReplicaState, names: dict[int, str], device: torch.device
) -> None:
    """Like `load_state_dict`, which would round float64 state to float32."""
    groups, theirs = optimizer.param_groups, saved.common["groups"]
    units = [saved.units.get(f"{OF_PARAMETER}{names[id(p)]}") for group in groups for p in group["params"]]
    at = [number for number, group in enumerate(groups) for _ in group["params"]]
    if len(theirs) != len(groups) or any(u is None or u["group"] != n for u, n in zip(units, at, strict=True)):
        raise ConfigError(f"The checkpoint's optimizer has other groups of parameters. {SAME}")
    for group, values in zip(groups, theirs, strict=True):
        group.update({name: value for name, value in _restored(values, device).items() if name not in NOT_STATE})
    for param, unit in zip((p for group in groups for p in group["params"]), units, strict=True):
        if unit is not None and unit["state"]:
            optimizer.state[param] = {
                name: entry.to(device) if isinstance(entry, Tensor) and name != "step" else entry
                for name, entry in _restored(unit["state"], device).items()
            }


def _plain_of(owner: Any, path: str) -> Any:
    return _plain(owner.state_dict(), path, type(owner).__name__)


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
