"""`lockstep report`: one HTML page about a run, or about several side by side."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="The folders of runs, finished or not.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. Default: report.html in the run's folder; of several runs, in the folder above.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one HTML page about runs, to look at or to send away."""
    from lockstep.training.report_runs import write_report

    typer.echo(write_report(runs, out))
