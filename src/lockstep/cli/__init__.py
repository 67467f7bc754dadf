"""The command line: one command a file. `lockstep --help` imports no framework and answers at once."""

import os
import sys
from itertools import pairwise
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep.cli.bench import bench
from lockstep.cli.compare import compare
from lockstep.cli.completion import with_completion, without_value
from lockstep.cli.data import data
from lockstep.cli.devices import devices
from lockstep.cli.errors import exit_with, is_reported_elsewhere, plain_errors
from lockstep.cli.evaluate import evaluate
from lockstep.cli.explain import explain
from lockstep.cli.plan import plan
from lockstep.cli.report import report
from lockstep.cli.runs import runs
from lockstep.cli.train import train


class Command(TyperCommand):
    """A command whose help shows no type for a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments."""
        return without_value(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """All commands; the help shows no type for a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the program."""
        return without_value(super().get_params(ctx))


app = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode="rich",  # loaded when help is shown, not before
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, plan, explain, evaluate, compare, report, runs, bench, devices, data):
    app.command(cls=Command)(with_completion(command))


@app.callback(invoke_without_command=True)
def lockstep(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Show the version and exit.")
) -> None:
    """Train one model on k devices: the same weights, bit for bit, whatever k is."""
    if version:
        from lockstep import __version__

        typer.echo(f"lockstep {__version__}")
    elif context.invoked_subcommand is None:
        context.get_help()  # which prints it


def main(arguments: list[str] | None = None) -> None:
    """The program `lockstep`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = typer.main.get_command(app)
    if "_LOCKSTEP_COMPLETE" in os.environ:  # a shell asks what could follow
        app(prog_name="lockstep")
    status = 0
    with plain_errors():
        try:  # not the library's own `main`, which has other exit statuses for an interrupt and a closed pipe
            with command.make_context("lockstep", list(arguments)) as context:
                command.invoke(context)
        except Exception as error:
            if hasattr(error, "format_message"):
                _exit_with_usage_error(error, arguments)
            if not hasattr(error, "exit_code"):  # --help and --version end with it
                raise
            status = error.exit_code
        sys.stdout.flush()  # here, where a closed pipe is understood
    raise SystemExit(status)


def _exit_with_usage_error(error: Any, arguments: list[str]) -> NoReturn:
    if is_reported_elsewhere():
        raise SystemExit(2)
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "lockstep"
    message = error.format_message()
    sentence = message if message.endswith((".", "?")) else f"{message}."
    exit_with(f"{sentence}{_got(error, arguments)} See {command} --help.", status=2)


def _got(error: Exception, arguments: list[str]) -> str:
    """The value of the option that a usage error is about: typer's message leaves it out."""
    options = getattr(getattr(error, "param", None), "opts", [])
    parts = [part for argument in arguments for part in argument.split("=", 1)]
    values = [value for option, value in pairwise(parts) if option in options]
    return f" Got {values[-1]!r}." if values else ""
