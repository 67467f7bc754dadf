"""`lockstep train`: the text's experiment, or a model and data of your own, on k devices."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.backends import DEFAULT_BACKEND
from lockstep.cli import options
from lockstep.cli.errors import plain_answers


@plain_answers
def train(
    context: typer.Context,
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
    bucket_mb: Annotated[
        float,
        typer.Option(
            help="Gradients leave in parts of so many megabytes while others are still computed; 0: all at the end."
        ),
    ] = 8.0,
    balance: Annotated[
        str, typer.Option(help="Shards for each device: equal, or measured, more for those that are faster.")
    ] = "equal",
    compile: Annotated[
        bool, typer.Option("--compile", help="Make the model into code of its own first: faster steps, other bits.")
    ] = False,
    capture: Annotated[
        bool, typer.Option("--capture/--no-capture", help="Record a step on one GPU once, and replay it.")
    ] = True,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Write what every device does, and when, to trace.json, for Chrome or Perfetto."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Without it: runs/ and a name.", show_default=False)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in --out from its last checkpoint, on any devices. Settings that are not given "
            "are the run's own.",
        ),
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints. Without it: one after each epoch; 0: none.", show_default=False),
    ] = None,
    keep_checkpoints: Annotated[int, typer.Option(help="Keep the last so many checkpoints.")] = 3,
    check_every: Annotated[int, typer.Option(help="Steps after which the replicas are compared; 0: never.")] = 100,
    heal: Annotated[
        bool,
        typer.Option("--heal", help="When replicas differ, go back to where they were equal, instead of stopping."),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that devices wait for one of them in an exchange.")] = 60.0,
    on_hang: Annotated[
        str, typer.Option(help="What then: stop, or drop the device and go on (engine processes).")
    ] = "stop",
    max_restarts: Annotated[
        int, typer.Option(help="Workers that are started anew when one dies; after that, the others go on without it.")
    ] = 3,
    json: options.Json = False,
) -> None:
    """Train a model and record the run."""
    from lockstep.config import RunConfig
    from lockstep.core.torchrun_env import says_the_result
    from lockstep.report.runlog import new_folder, to_json
    from lockstep.training.run import run

    settings: dict[str, Any] = dict(  # noqa: C408 - as they are called in RunConfig
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
        compile=compile,
        capture=capture,
        trace=trace,
        num_epochs=epochs,
        num_shards=shards,
        seed=seed,
        backend=backend,
        devices=devices,
        engine=engine,
        exchange=exchange,
        bucket_mb=bucket_mb,
        balance=balance,
        workers=workers,
        data_dir=data_dir,
        out=out if resume else out or new_folder(f"{short(model)}-{short(data)}"),
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        check_every=check_every,
        heal=heal,
        timeout=timeout,
        on_hang=on_hang,
        max_restarts=max_restarts,
    )
    if resume and out is not None:
        settings |= recorded_settings(context, out)
    config = RunConfig(**settings)
    result = run(config, resume=resume)
    if says_the_result():
        typer.echo(to_json(result.summary()) if json else result.lines())


def recorded_settings(context: typer.Context, folder: Path) -> dict[str, Any]:
    """The settings of the run in `folder`, but for what was given now. A file never names code to run."""
    from lockstep.training.checkpoint import IDENTITY
    from lockstep.core.errors import ConfigError
    from lockstep.core.entry_points import is_place
    from lockstep.report.runlog import read_settings

    names = {"lr": "learning_rate", "epochs": "num_epochs", "shards": "num_shards"}
    options = [option for option in context.params if option not in ("out", "resume", "json")]
    given = {
        names.get(option, option)
        for option in options
        if str(context.get_parameter_source(option)) != "ParameterSource.DEFAULT"
    }
    if not (folder / "config.json").is_file():
        if not given & set(IDENTITY):
            raise ConfigError(f"There is no run in {folder} to go on with. To begin one there, give its settings.")
        return {}
    recorded = read_settings(folder)
    found = {name: recorded[name] for name in (names.get(o, o) for o in options) if name in recorded}
    found = {name: value for name, value in found.items() if name not in given}
    own = [(name, value) for name, value in found.items() if isinstance(value, str) and name in IDENTITY]
    own = [(name, value) for name, value in own if is_place(value) or value.endswith(" given in Python")]
    if own:
        wanted = " ".join(f"--{n} {v if is_place(v) else 'package.file:function'}" for n, v in own)
        what = " and ".join(f"{name} {value}" for name, value in own)
        raise ConfigError(
            f"The run in {folder} has code of your own: {what}. A record does not name code to run: add {wanted}."
        )
    return found


def short(name: str) -> str:
    """A name for a folder: of `package.file:function` and of a path only the last part."""
    return Path(name.rpartition(":")[2] or name).stem
