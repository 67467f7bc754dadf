"""The command line: one command a file. `lockstep --help` imports no framework and answers at once."""

import typer

from lockstep.cli.compare import compare
from lockstep.cli.data import data
from lockstep.cli.devices import devices
from lockstep.cli.evaluate import evaluate
from lockstep.cli.train import train

app = typer.Typer(
    help="Train one model on k devices: the same weights, bit for bit, whatever k is.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # the decorated help costs 0.1 s at every start
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, evaluate, compare, devices, data):
    app.command()(command)


@app.callback(invoke_without_command=True)
def lockstep(version: bool = typer.Option(False, "--version", help="Show the version and leave.")) -> None:
    """Train one model on k devices: the same weights, bit for bit, whatever k is."""
    if version:
        from lockstep import __version__

        typer.echo(f"lockstep {__version__}")
        raise typer.Exit()


def main() -> None:
    """The program `lockstep`."""
    app(prog_name="lockstep")
