"""Code of the user's own: named on the command line (`package.file:function`), called, and found in a traceback."""

import difflib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.core.errors import ConfigError, LockstepError

NOT_THE_USERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
OWN = "; or one of your own: package.file:function"


def is_place(name: str) -> bool:
    """Whether `name` says where something is, and is not itself the name of something that we have.

    >>> is_place("mypackage.nets:make_model"), is_place("resnet18"), is_place("data/mine.npz")
    (True, False, False)
    """
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


def load_named(name: str, what: str) -> Any:
    """What `package.file:function` stands for. Files in the current folder are found too.

    >>> load_named("math:sqrt", "model")(4.0)
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


def called(function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """What the user's function gives; the error names it, and the user's own line.

    >>> called(lambda: 1 / 0, "data")
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


def user_source_line(error: BaseException) -> str:
    """`file:line` of the last place in the user's own code that `error` went through, or nothing."""
    where, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_users(file):
            where = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where


def source_line_of(frame: FrameType | None) -> str:
    """`file:line` that a thread is at: in the user's code that we called, where there is some, else the innermost."""
    while frame is not None and frame.f_code.co_filename.startswith("<"):  # <frozen importlib>: there is no such file
        frame = frame.f_back
    innermost = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None and not frame.f_code.co_filename.startswith(str(Path(__file__).parents[1])):
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost


def user_traceback(error: BaseException) -> str:
    """The part of an error's traceback that begins in the user's own code; nothing where there is none."""
    trace = error.__traceback__
    while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, trace, chain=False)).rstrip()


def _is_users(file: str) -> bool:
    return not file.startswith(NOT_THE_USERS) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def name_of(value: Any) -> str:
    """What a run's record calls a thing that was given in Python: its place where it has one, else its kind.

    >>> import math
    >>> name_of(math.sqrt), name_of(lambda: 1), name_of([1, 2])
    ('math:sqrt', 'a function given in Python', 'a list given in Python')
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and is_place(f"{module}:{name}") and module != "__main__":
        return f"{module}:{name}"
    if callable(value) and isinstance(name, str):
        return f"{name} given in Python" if name.isidentifier() else "a function given in Python"
    kind = type(value).__name__
    return f"a {kind} given in Python"
