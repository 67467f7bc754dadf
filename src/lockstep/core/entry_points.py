"""Code of the user's own, named on the command line as an entry point, `package.module:function`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, LockstepError
from lockstep.core.registry import nearest
from lockstep.core.source_lines import at, user_source_line

OWN = "; or an entry point of your own: package.module:function"
GIVEN = " given in Python"  # how what `describe` says ends, where there is no entry point


def is_entry_point(name: str) -> bool:
    """Whether `name` is the entry point of something, and not the name of something that comes with Lockstep.

    >>> is_entry_point("mypackage.nets:make_model"), is_entry_point("resnet18"), is_entry_point("data/mine.npz")
    (True, False, False)
    """
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


def load_entry_point(name: str, what: str) -> Any:
    """The object at `package.module:function`. Files in the current folder are found too.

    >>> load_entry_point("math:sqrt", "model")(4.0)
    2.0
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # and it stays: what is loaded may import its neighbours later
    try:
        found: Any = importlib.import_module(module)
    except Exception as problem:
        why = f"importing {module} fails with {type(problem).__name__}: {problem}"
        if isinstance(problem, ModuleNotFoundError):
            is_itself = problem.name is not None and f"{module}.".startswith(f"{problem.name}.")
            needs = f"{module} needs {problem.name}, which is not installed"
            why = f"there is no module {module}, neither installed nor in {here}" if is_itself else needs
        raise ConfigError(f"The {what} {name} cannot be loaded: {why}.") from problem
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [n for n, v in vars(found).items() if getattr(v, "__module__", None) == module and n[:1] != "_"]
            hint, has = nearest(part, own), ", ".join(own) or "nothing"
            raise ConfigError(f"{module} has no {part} for the {what}.{hint} It has: {has}.")
        found = getattr(found, part)
    return found


def call_user_function(function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """What the user's function returns; an error names it, and the user's own line.

    >>> call_user_function(lambda: 1 / 0, "data")
    Traceback (most recent call last):
    lockstep.core.errors.ConfigError: The function for the data failed: ZeroDivisionError: division by zero
    """
    try:
        return function(*arguments)
    except LockstepError:
        raise
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}{at(user_source_line(problem))}"
        raise ConfigError(f"The function for the {what} failed: {why}") from problem


def describe(value: Any) -> str:
    """What a run's record calls a user object: its entry point where it has one, else its type.

    >>> import math
    >>> describe(math.sqrt), describe(lambda: 1), describe([1, 2])
    ('math:sqrt', 'a function given in Python', 'a list given in Python')
    """
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if module != "__main__" and is_entry_point(f"{module}:{name}"):
        return f"{module}:{name}"
    if name and callable(value):
        return f"{name}{GIVEN}" if str(name).isidentifier() else f"a function{GIVEN}"
    return f"a {type(value).__name__}{GIVEN}"
