"""Options of commands: the settings of a run, made from their fields in `config.py`, and a few that commands share."""

import inspect
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any, get_args

import typer

from lockstep.config import TYPES, field_of, settings_in
from lockstep.core.settings import help_of, option_of

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]


def with_settings(*options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each of these settings of a run, or for all; they reach it as keyword arguments."""
    chosen = [field_of(option) for option in options] or settings_in()

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind != inspect.Parameter.VAR_KEYWORD]
        first = [parameter for parameter in own if parameter.default is parameter.empty]
        rest = [parameter for parameter in own if parameter.default is not parameter.empty]
        parameters = [*first, *map(parameter_of, chosen), *rest]
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        return command

    return decorate


def parameter_of(each: "Field[Any]") -> inspect.Parameter:
    """A setting as a parameter that the command-line library understands."""
    name, kind = option_of(each), TYPES[each.name]
    if str in get_args(kind):  # a number, or a list of devices
        kind = str | None
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        flag = f"{flag}/--no-{name}" if each.default else flag
    option = typer.Option(flag, help=help_of(each), show_default=each.default is not None)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=Annotated[kind, option]
    )


def config_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Options by the names that they have in `RunConfig`."""
    return {field_of(option).name: value for option, value in options.items()}
