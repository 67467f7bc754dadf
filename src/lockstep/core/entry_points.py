"""Code of the user's own, named on the command line as an entry point, `package.file:function`."""

import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, LockstepError
from lockstep.core.source_lines import user_source_line

OWN = "; or an entry point of your own: package.file:function"


def is_entry_point(name: str) -> bool:
    """Whether `name` says where something is, and is not itself the name of something that we have.

    >>> is_entry_point("mypackage.nets:make_model"), is_entry_point("resnet18"), is_entry_point("data/mine.npz")
    (True, False, False)
    """
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


def load_entry_point(name: str, what: str) -> Any:
    """What `package.file:function` stands for. Files in the current folder are found too.

    >>> load_entry_point("math:sqrt", "model")(4.0)
    2.0
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # and it stays: what is loaded may import its neighbours later
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module}.".startswith(f"{missing.name}."):
            raise ConfigError(
                f"The {what} {name} cannot be loaded: {module} needs {missing.name}, which is not there."
            ) from missing
        raise ConfigError(
            f"The {what} {name} cannot be loaded: there is no module {module}, neither installed nor in {here}."
        ) from missing
    except Exception as problem:
        raise ConfigError(
            f"The {what} {name} cannot be loaded: importing {module} fails with {type(problem).__name__}: {problem}."
        ) from problem
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = [n for n, v in vars(found).items() if getattr(v, "__module__", None) == module and n[:1] != "_"]
            near = difflib.get_close_matches(part, own, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{module} has no {part} for the {what}.{hint} It has: {', '.join(own) or 'nothing'}.")
        found = getattr(found, part)
    return found


def call_user_function(function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """What the user's function gives; the error names it, and the user's own line.

    >>> call_user_function(lambda: 1 / 0, "data")
    Traceback (most recent call last):
    lockstep.core.errors.ConfigError: The function for the data failed: ZeroDivisionError: division by zero
    """
    try:
        return function(*arguments)
    except LockstepError:
        raise
    except Exception as problem:
        where = user_source_line(problem)
        at = f" (at {where})" if where else ""
        raise ConfigError(f"The function for the {what} failed: {type(problem).__name__}: {problem}{at}") from problem


def describe(value: Any) -> str:
    """What a run's record calls a user object: its entry point where it has one, else its kind.

    >>> import math
    >>> describe(math.sqrt), describe(lambda: 1), describe([1, 2])
    ('math:sqrt', 'a function given in Python', 'a list given in Python')
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if (
        isinstance(module, str)
        and isinstance(name, str)
        and is_entry_point(f"{module}:{name}")
        and module != "__main__"
    ):
        return f"{module}:{name}"
    if callable(value) and isinstance(name, str):
        return f"{name} given in Python" if name.isidentifier() else "a function given in Python"
    kind = type(value).__name__
    return f"a {kind} given in Python"
