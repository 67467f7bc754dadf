"""`lockstep compare`: the text's first two exercises, a grid of device counts, batch sizes and learning rates."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.backends import DEFAULT_BACKEND
from lockstep.cli import options
from lockstep.cli.errors import plain_answers


@plain_answers
def compare(
    devices: Annotated[str, typer.Option(help="Numbers of devices, like 1,2.")] = "1,2",
    batch_size: Annotated[str, typer.Option(help="Batch sizes, like 256 or 128,256.")] = "256",
    lr: Annotated[str, typer.Option(help="Learning rates, like 0.2 or 0.1,0.2,0.4.")] = "0.2",
    scale_batch: Annotated[
        bool, typer.Option("--scale-batch", help="On k devices, take batches k times as large.")
    ] = False,
    epochs: options.Epochs = 10,
    model: options.Model = "lenet",
    data: options.Data = "fashion-mnist",
    data_dir: options.DataDir = None,
    shards: options.Shards = 8,
    seed: options.Seed = 0,
    backend: options.Backend = DEFAULT_BACKEND,
    exchange: options.Exchange = "sharded",
    out: Annotated[Path | None, typer.Option(help="Folder for the table and the picture.", show_default=False)] = None,
    json: options.Json = False,
) -> None:
    """Train a grid of runs and compare accuracy and time."""
    from lockstep.config import RunConfig
    from lockstep.training.sweep import make_grid, run_grid, save_grid, sentence, table
    from lockstep.report.runlog import new_folder, to_json

    base = RunConfig(
        model=model,
        data=data,
        data_dir=data_dir,
        num_epochs=epochs,
        num_shards=shards,
        seed=seed,
        backend=backend,
        exchange=exchange,
        checkpoint_every=0,
    )
    grid = make_grid(base, devices, batch_size, lr, scale_batch)
    folder = out or new_folder("compare")
    rows = run_grid(grid, folder)
    save_grid(rows, folder)
    if json:
        typer.echo(to_json({"rows": [row.plain() for row in rows], "sentence": sentence(rows), "out": folder}))
        return
    typer.echo(table(rows))
    typer.echo(sentence(rows))
    typer.echo(f"{folder / 'compare.csv'}, {folder / 'compare.png'}")
