"""`lockstep evaluate`: the metrics of a finished run, on any devices."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options
from lockstep.cli.errors import plain_answers

Place = Annotated[
    str | None,
    typer.Option(
        help="The run's own code, package.file:function: it is not run because a file names it.", show_default=False
    ),
]


@plain_answers
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    devices: options.Devices = None,
    data_dir: options.DataDir = None,
    backend: Annotated[
        str | None, typer.Option(help="Another framework than the run was trained with.", show_default=False)
    ] = None,
    model: Place = None,
    data: Place = None,
    loss: Place = None,
    json: options.Json = False,
) -> None:
    """Evaluate a finished run on its test samples, each counted once."""
    from lockstep.training.evaluate import evaluate_run
    from lockstep.report.console import fetch_progress
    from lockstep.report.runlog import to_json

    places = {"model": model, "data": data, "loss": loss}
    own = {what: place for what, place in places.items() if place is not None}
    with fetch_progress() as progress:
        result = evaluate_run(run, devices, data_dir, backend, progress, own)
    typer.echo(to_json(result.summary()) if json else result.lines())
