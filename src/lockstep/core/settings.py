"""One option of a run, written once: a dataclass field that carries its help, its check and its scope."""

import math
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import Field, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

from lockstep.core.errors import ConfigError
from lockstep.core.registry import pick

IDENTITY = "identity"  # the bits of a run depend on it: a resumed run must have the same
AGREED = "agreed"  # all ranks of a run must have the same; the bits do not depend on it
LOCAL = "local"  # of this process only


class Limits(NamedTuple):
    """The numbers that are allowed."""

    text: str  # "at least 1"
    allow: Callable[[float], bool]


def at_least(least: float) -> Limits:
    """`least` or more."""
    return Limits(f"at least {least:g}", lambda value: least <= value < math.inf)


def above(lower: float, upper: float = math.inf) -> Limits:
    """More than `lower`, and less than `upper`."""
    text = f"more than {lower:g}" + (f" and less than {upper:g}" if upper < math.inf else "")
    return Limits(text, lambda value: lower < value < upper)


def from_to_below(least: float, upper: float) -> Limits:
    """`least` or more, and less than `upper`."""
    return Limits(f"at least {least:g} and less than {upper:g}", lambda value: least <= value < upper)


def between(least: float, most: float) -> Limits:
    """From `least` to `most`."""
    return Limits(f"from {least} to {most}", lambda value: least <= value <= most)


def setting(
    default: Any,
    help: str,
    scope: str = LOCAL,
    *,
    limits: Limits | None = None,
    choices: Mapping[str, Any] | None = None,
    option: str = "",
) -> Any:
    """A dataclass field. `choices` are the names that it takes, `option` is what it is called for the user."""
    metadata = {"help": help, "scope": scope, "limits": limits, "choices": choices, "option": option}
    return field(default=default, metadata=metadata)


def option_of(each: "Field[Any]") -> str:
    """What a setting is called on the command line and in `lockstep.train`."""
    return str(each.metadata["option"] or each.name)


def help_of(each: "Field[Any]") -> str:
    """The help text, with the names that can be chosen."""
    choices = each.metadata["choices"]
    return str(each.metadata["help"]) + (f" One of: {', '.join(choices)}." if choices else "")


def checked(each: "Field[Any]", kind: Any, value: Any) -> Any:
    """The value as the type of its setting; refuses what it cannot be, with the option's name."""
    kinds = [entry for entry in (get_args(kind) or (kind,)) if entry is not types.NoneType]
    flag, words = f"--{option_of(each).replace('_', '-')}", each.name.removeprefix("num_").replace("_", " ")
    if value is None and len(kinds) < len(get_args(kind)):
        return None
    if kinds == [int]:
        try:
            value = operator.index(value)  # numpy's integers too
        except TypeError:
            raise ConfigError(f"{words} must be an integer, got {value!r} ({flag}).") from None
    elif kinds == [float]:
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{words} must be a number, got {value!r} ({flag}).") from None
    elif kinds == [str] and not isinstance(value, str):
        hint = " A function of the optimizer goes to scheduler=." if each.name == "schedule" else ""
        raise ConfigError(f"{words} must be a name, got {value!r} ({flag}).{hint}")
    elif kinds == [bool] and not isinstance(value, bool):
        raise ConfigError(f"{words} must be True or False, got {value!r} ({flag}).")
    elif kinds == [Path]:
        value = Path(value)
    limits, choices = each.metadata["limits"], each.metadata["choices"]
    if limits is not None and not limits.allow(value):
        raise ConfigError(f"{words} must be {limits.text}, got {value} ({flag}).")
    if choices is not None:
        pick(choices, value, words)
    return value
