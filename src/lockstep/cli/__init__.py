"""The command line: one command a file. `lockstep --help` imports no framework and answers at once."""

import sys

import typer

from lockstep.cli.bench import bench
from lockstep.cli.compare import compare
from lockstep.cli.data import data
from lockstep.cli.devices import devices
from lockstep.cli.errors import is_reported_elsewhere, leave
from lockstep.cli.evaluate import evaluate
from lockstep.cli.train import train

app = typer.Typer(
    help="Train one model on k devices: the same weights, bit for bit, whatever k is.",
    add_completion=False,
    rich_markup_mode=None,  # the decorated help costs 0.1 s at every start
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, evaluate, compare, bench, devices, data):
    app.command()(command)


@app.callback(invoke_without_command=True)
def lockstep(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Show the version and leave.")
) -> None:
    """Train one model on k devices: the same weights, bit for bit, whatever k is."""
    if version:
        from lockstep import __version__

        typer.echo(f"lockstep {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """The program `lockstep`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(arguments, prog_name="lockstep", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a usage error of the command-line library
            raise
        if is_reported_elsewhere():
            raise SystemExit(2) from None
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "lockstep"
        leave(f"{error.format_message().rstrip('.')}.{_given(error, arguments)} See {command} --help.", status=2)
    raise SystemExit(status)


def _given(error: Exception, arguments: list[str]) -> str:
    """The value that was given for the option that `error` is about: the library's message leaves it out."""
    for option in getattr(getattr(error, "param", None), "opts", []):
        for place, argument in enumerate(arguments):
            if argument == option and place + 1 < len(arguments):
                return f" It was given {arguments[place + 1]!r}."
            if argument.startswith(f"{option}="):
                return f" It was given {argument.partition('=')[2]!r}."
    return ""
