"""`lockstep compare`: the text's first two exercises, a sweep over device counts, batch sizes and learning rates."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options


@options.with_settings("epochs", "model", "data", "data_dir", "shards", "seed", "backend", "exchange")
def compare(
    devices: Annotated[str, typer.Option(help="Numbers of devices, like 1,2.")] = "1,2",
    batch_size: Annotated[str, typer.Option(help="Batch sizes, like 256 or 128,256.")] = "256",
    lr: Annotated[str, typer.Option(help="Learning rates, like 0.2 or 0.1,0.2,0.4.")] = "0.2",
    scale_batch: Annotated[
        bool, typer.Option("--scale-batch", help="On k devices, take batches k times as large.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for compare.csv and compare.png. Default: a new one below runs/.", show_default=False
        ),
    ] = None,
    json: options.Json = False,
    **settings: Any,
) -> None:
    """Train a sweep of runs and compare accuracy and time."""
    from lockstep.config import RunConfig
    from lockstep.report.runlog import new_folder, to_json
    from lockstep.training.sweep import make_sweep, run_sweep, save_sweep, sentence, table

    base = RunConfig(checkpoint_every=0, **options.config_settings(settings))
    sweep = make_sweep(base, devices, batch_size, lr, scale_batch)
    with nullcontext(out) if out else new_folder("compare") as folder:
        rows = run_sweep(sweep, folder)
        save_sweep(rows, folder)
    if json:
        typer.echo(to_json({"rows": [row.plain() for row in rows], "sentence": sentence(rows), "out": folder}))
        return
    typer.echo(table(rows))
    typer.echo(sentence(rows))
    typer.echo(f"{folder / 'compare.csv'}, {folder / 'compare.png'}")
