"""Options of commands: the settings of a run, made from their fields in `config.py`, and a few that commands share."""

import inspect
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any, get_args

import typer

from lockstep.config import TYPES, field_of, settings_in
from lockstep.core.settings import flag_of, help_of, option_of

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]


def with_settings(*options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each of these settings of a run, or for all; they reach it as keyword arguments."""
    chosen = [parameter_of(field_of(option)) for option in options] or [parameter_of(each) for each in settings_in()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind != inspect.Parameter.VAR_KEYWORD]
        parameters = [*chosen, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def parameter_of(spec: "Field[Any]") -> inspect.Parameter:
    """A setting as a parameter that typer understands."""
    annotation, flag = TYPES[spec.name], flag_of(spec)
    if str in get_args(annotation):  # a number, or a list of devices
        annotation = str | None
    if annotation is bool and spec.default:
        flag = f"{flag}/--no-{flag[2:]}"
    annotation = Annotated[annotation, typer.Option(flag, help=help_of(spec), show_default=spec.default is not None)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(option_of(spec), keyword, default=spec.default, annotation=annotation)


def config_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Options by the names that they have in `RunConfig`."""
    return {field_of(option).name: value for option, value in options.items()}
