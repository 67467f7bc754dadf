"""`lockstep explain`: where the time of a traced run went."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options
from lockstep.cli.output import say
from lockstep.core.terminal import width_of


def explain(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was traced (--trace).", show_default=False)],
    json: options.Json = False,
) -> None:
    """Say where the time of a step went, and what to change first."""
    from lockstep.analysis.explain import explain as explained
    from lockstep.core.files import printable
    from lockstep.report.runlog import to_json

    found = explained(run)
    if json:
        typer.echo(to_json(found.plain()))
    else:
        say("\n".join(map(printable, found.lines(width_of(sys.stdout)))))
