"""`lockstep train`: the text's experiment on k devices."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.backends import DEFAULT_BACKEND
from lockstep.cli import options
from lockstep.cli.answers import plain_answers


@plain_answers
def train(
    devices: options.Devices = None,
    batch_size: Annotated[int, typer.Option(help="Samples of one update, over all devices together.")] = 256,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.2,
    epochs: options.Epochs = 10,
    model: options.Model = "lenet",
    data: options.Data = "fashion-mnist",
    data_dir: options.DataDir = None,
    shards: options.Shards = 8,
    seed: options.Seed = 0,
    backend: options.Backend = DEFAULT_BACKEND,
    engine: options.Engine = "inprocess",
    exchange: options.Exchange = "sharded",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Without it: runs/ and a name.", show_default=False)
    ] = None,
    json: options.Json = False,
) -> None:
    """Train a model and record the run."""
    from lockstep.config import RunConfig
    from lockstep.report.runlog import new_folder, to_json
    from lockstep.run import run

    config = RunConfig(
        model=model,
        data=data,
        batch_size=batch_size,
        learning_rate=lr,
        num_epochs=epochs,
        num_shards=shards,
        seed=seed,
        backend=backend,
        devices=devices,
        engine=engine,
        exchange=exchange,
        data_dir=data_dir,
        out=out or new_folder(f"{model}-{Path(data).stem}"),
    )

    result = run(config)
    typer.echo(to_json(result.summary()) if json else result.lines())
