"""Options of commands: the settings of a run, made from their fields in `config.py`, and a few that commands share."""

import inspect
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any, get_args

import typer

from lockstep.config import TYPES, field_of, settings_in
from lockstep.core.settings import flag_of, help_of, option_of

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress: only the result, and errors.")]


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
    if annotation is bool:  # a run that is resumed has it, unless told otherwise
        flag = f"{flag}/--no-{flag[2:]}"
    option = typer.Option(
        flag,
        help=help_of(spec),
        show_default=spec.default is not None,
        rich_help_panel=spec.metadata["group"],
    )
    annotation = Annotated[annotation, option]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(option_of(spec), keyword, default=spec.default, annotation=annotation)


def given_settings(context: typer.Context) -> set[str]:
    """The settings that were given on the command line, by their names in `RunConfig`."""
    known = {option_of(each): each.name for each in settings_in()}
    return {known[name] for name in context.params if name in known and is_given(context, name)}


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    return str(context.get_parameter_source(name)) != "ParameterSource.DEFAULT"


def config_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Options by the names that they have in `RunConfig`."""
    return {field_of(option).name: value for option, value in options.items()}
