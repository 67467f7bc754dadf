"""One option of a run, written once: a dataclass field that carries its help, its check and its scope."""

import math
import operator
from collections.abc import Mapping
from dataclasses import Field, field
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from lockstep.core.errors import ConfigError
from lockstep.core.files import can_be_path
from lockstep.core.registry import nearest

IDENTITY = "identity"  # the bits of a run depend on it: a resumed run must have the same
AGREED = "agreed"  # all ranks of a run must have the same; the bits do not depend on it
LOCAL = "local"  # of this process only

# groups of options in the help, the few that matter most first
MAIN, OPTIMIZATION, RANKS = "Options", "Optimization (changes the weights)", "How ranks work"
RECORDS, FAILURES = "What is recorded", "Checks and failures"

COMPARISONS = {
    ">=": ("at least", operator.ge),
    ">": ("more than", operator.gt),
    "<=": ("at most", operator.le),
    "<": ("less than", operator.lt),
}
TYPE_NAMES = {int: "an integer", float: "a number", str: "a name", bool: "True or False", Path: "a path"}


def setting(
    default: Any,
    help: str,
    scope: str = LOCAL,
    *,
    limits: Mapping[str, float] | None = None,
    choices: Mapping[str, Any] | None = None,
    option: str = "",
    group: str = RANKS,
) -> Any:
    """A dataclass field, with limits like {">=": 0, "<": 1}; `option` is its name for users, where that is another.

    `group` is the part of the help that it is in.
    """
    metadata = {"help": help, "scope": scope, "limits": limits or {}, "choices": choices, "option": option}
    return field(default=default, metadata=metadata | {"group": group})


def option_of(spec: "Field[Any]") -> str:
    """What a setting is called in `lockstep.train`."""
    return str(spec.metadata["option"] or spec.name)


def flag_of(spec: "Field[Any]") -> str:
    """What a setting is called on the command line."""
    return f"--{option_of(spec).replace('_', '-')}"


def help_of(spec: "Field[Any]") -> str:
    """The help text, with the names that can be chosen and, where they are strings, what each one means."""
    choices: Mapping[str, Any] = spec.metadata["choices"] or {}
    named = [f"{name}: {about}" for name, about in choices.items() if isinstance(about, str)]
    listed = f" {'; '.join(named)}." if named else f" One of: {', '.join(choices)}." if choices else ""
    return f"{spec.metadata['help']}{listed}"


def checked(spec: "Field[Any]", annotation: Any, value: Any) -> Any:
    """The value as the type of its setting; an error names the value, what is allowed and the option."""
    types = [entry for entry in get_args(annotation) or (annotation,) if entry is not NoneType]
    if value is None and types != [annotation]:
        return None
    words = spec.name.removeprefix("num_").replace("_", " ")
    if len(types) == 1:  # devices, a number or a list, are checked where they are looked up
        try:
            value = _converted(types[0], value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{words} must be {TYPE_NAMES[types[0]]}, got {value!r} ({flag_of(spec)}).") from None
    limits = [(*COMPARISONS[sign], bound) for sign, bound in spec.metadata["limits"].items()]
    if limits and not (value < math.inf and all(allows(value, bound) for _, allows, bound in limits)):
        allowed = " and ".join(f"{text} {bound}" for text, _, bound in limits)
        raise ConfigError(f"{words} must be {allowed}, got {value} ({flag_of(spec)}).")
    choices = spec.metadata["choices"]
    if choices is not None and value not in choices:
        *first, last = sorted(choices)
        allowed, hint = f"{', '.join(first)} or {last}", nearest(value.lower(), choices)
        raise ConfigError(f"{words} must be {allowed}, got {value!r} ({flag_of(spec)}).{hint}")
    return value


def _converted(target: Any, value: Any) -> Any:
    if target is int:
        return operator.index(value)  # numpy's integers too
    if target is Path and not can_be_path(str(value)):
        raise ValueError("no path")
    if target in (float, Path):
        return target(value)
    if not isinstance(value, target):
        raise TypeError
    return value
