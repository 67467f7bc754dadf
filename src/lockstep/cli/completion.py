"""What a shell offers after Tab: the names in the tables that options choose from."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_args

from typer.models import ParameterInfo

from lockstep.cli.bench import CONTENDERS, MODELS
from lockstep.config import settings_in
from lockstep.core import names
from lockstep.core.settings import option_of

# option or argument, of whatever command -> its names
TABLES: dict[str, Iterable[str]] = {
    **{option_of(each): each.metadata["choices"] for each in settings_in() if each.metadata["choices"]},
    "model": names.MODELS,
    "data": names.DATASETS,
    "name": names.DATASETS,  # of `lockstep data`
    "loss": names.LOSSES,
    "optimizer": names.OPTIMIZERS,
    "logger": names.LOGGERS,
    "split": ("data", "network", "layers", "auto"),
    "models": MODELS,
    "only": CONTENDERS,
}


def with_completion(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose options and arguments offer the names of their tables."""
    for name, parameter in inspect.signature(command).parameters.items():
        for info in get_args(parameter.annotation)[1:]:
            if isinstance(info, ParameterInfo) and name in TABLES:
                info.autocompletion = matching(TABLES[name])
    return command


def matching(table: Iterable[str]) -> Callable[[str], list[str]]:
    """A function that completes a name, or the last one of a list with commas. Without any, shells offer files.

    >>> matching(["sgd", "adam", "adamw"])("sgd,a")
    ['sgd,adam', 'sgd,adamw']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in table if name.startswith(last)]

    return complete


def without_value(params: list[Any]) -> list[Any]:
    """The options for the help, where a flag shows no type: it takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params
