"""`lockstep evaluate`: the metrics of a finished run, on any devices."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options

CODE = "package.module:function, if the run used one: give the same again."
EntryPoint = Annotated[str | None, typer.Option(help=CODE, show_default=False)]


@options.with_settings("devices", "data_dir")
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    backend: Annotated[
        str | None, typer.Option(help="Framework to evaluate in. Default: the run's own.", show_default=False)
    ] = None,
    model: EntryPoint = None,
    data: EntryPoint = None,
    loss: EntryPoint = None,
    json: options.Json = False,
    **settings: Any,
) -> None:
    """Evaluate a finished run on its test samples, each counted once."""
    from lockstep.report.console import fetch_progress
    from lockstep.report.runlog import to_json
    from lockstep.training.evaluate_run import evaluate_run

    entry_points = {"model": model, "data": data, "loss": loss}
    changed = {**settings, "backend": backend}
    with fetch_progress() as progress:
        result = evaluate_run(
            run,
            changed={name: value for name, value in changed.items() if value is not None},
            entry_points={what: name for what, name in entry_points.items() if name is not None},
            progress=progress,
        )
    typer.echo(to_json(result.summary()) if json else result.lines())
