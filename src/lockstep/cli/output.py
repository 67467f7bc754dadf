"""What commands print: on a terminal, sentences are broken between words; a pipe gets every line as it is."""

import sys

import typer

from lockstep.core.terminal import width_of, wrapped


def say(text: str) -> None:
    """Prints sentences on standard output."""
    typer.echo(wrapped(text, width_of(sys.stdout)))


def note(text: str) -> None:
    """Prints sentences on standard error."""
    print(wrapped(text, width_of(sys.stderr)), file=sys.stderr, flush=True)
