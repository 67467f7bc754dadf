"""`lockstep train`: the text's experiment, or a model and data of your own, on k devices."""

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
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate. Without it: 0.2 for sgd, 0.001 for adam and adamw.", show_default=False),
    ] = None,
    epochs: options.Epochs = 10,
    model: options.Model = "lenet",
    data: options.Data = "fashion-mnist",
    data_dir: options.DataDir = None,
    loss: Annotated[
        str,
        typer.Option(
            help="cross_entropy, mse, l1, bce, or package.file:function, of (output, y), one number for each sample."
        ),
    ] = "cross_entropy",
    optimizer: Annotated[
        str, typer.Option(help="sgd, adam, adamw, or package.file:function, which makes one of a list of parameters.")
    ] = "sgd",
    momentum: Annotated[float, typer.Option(help="Momentum of sgd.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    schedule: Annotated[
        str, typer.Option(help="The learning rate after the warm-up: constant, cosine, linear.")
    ] = "constant",
    warmup: Annotated[int, typer.Option(help="Steps in which the learning rate grows to its full value.")] = 0,
    clip_norm: Annotated[
        float | None, typer.Option(help="Make gradients with a larger norm shorter.", show_default=False)
    ] = None,
    batch_norm: Annotated[
        str, typer.Option(help="Whose statistics: shard, or sync, those of the whole batch.")
    ] = "shard",
    precision: Annotated[str, typer.Option(help="fp32, or bf16: bfloat16 where it is safe.")] = "fp32",
    shards: options.Shards = 8,
    seed: options.Seed = 0,
    backend: options.Backend = DEFAULT_BACKEND,
    engine: options.Engine = "inprocess",
    exchange: options.Exchange = "sharded",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that load samples of a map-style data set. Without it: one a core, four at most.",
            show_default=False,
        ),
    ] = None,
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
        loss=loss,
        optimizer=optimizer,
        batch_size=batch_size,
        learning_rate=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup=warmup,
        clip_norm=clip_norm,
        batch_norm=batch_norm,
        precision=precision,
        num_epochs=epochs,
        num_shards=shards,
        seed=seed,
        backend=backend,
        devices=devices,
        engine=engine,
        exchange=exchange,
        workers=workers,
        data_dir=data_dir,
        out=out or new_folder(f"{short(model)}-{short(data)}"),
    )

    result = run(config)
    typer.echo(to_json(result.summary()) if json else result.lines())


def short(name: str) -> str:
    """A name for a folder: of `package.file:function` and of a path only the last part."""
    return Path(name.rpartition(":")[2] or name).stem
