"""`lockstep compare`: the text's first two exercises, a sweep of runs; or runs that are there already, compared."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.output import say
from lockstep.core.terminal import width_of

if TYPE_CHECKING:
    from lockstep.training.sweep_file import Sweep

SETTINGS = ("epochs", "model", "data", "data_dir", "seed", "backend")  # of every run of a sweep


@options.with_settings(*SETTINGS)
def compare(
    context: typer.Context,
    *,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of finished runs. Without any, a sweep of runs is trained.", show_default=False),
    ] = None,
    devices: Annotated[str, typer.Option(help="Numbers of devices, like 1,2.")] = "1,2",
    batch_size: Annotated[str, typer.Option(help="Batch sizes, like 256 or 128,256.")] = "256",
    lr: Annotated[
        str | None,
        typer.Option(
            help="Learning rates, like 0.2 or 0.1,0.2,0.4. Default: 0.2; adam, adamw: 0.001.", show_default=False
        ),
    ] = None,
    scale_batch: Annotated[
        bool, typer.Option("--scale-batch", help="On k devices, take batches k times as large.")
    ] = False,
    target: Annotated[
        float | None,
        typer.Option(
            help="The test accuracy that samples and seconds are counted to. Default: 95 % of the best.",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[str, typer.Option(help="Numbers of shards, like 8 or 4,8.")] = "8",
    optimizer: Annotated[str, typer.Option(help="Optimizers, like sgd or sgd,adamw.")] = "sgd",
    exchange: Annotated[str, typer.Option(help="All-reduce algorithms, like sharded,tree.")] = "sharded",
    engine: Annotated[str, typer.Option(help="Engines, like inprocess,processes.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for compare.csv, compare.png and the runs. Default: a new one below runs/.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in --out: what is finished is not trained again.")
    ] = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
    **settings: Any,
) -> None:
    """Train a sweep of runs and compare accuracy and time; or compare finished runs."""
    from lockstep.config import RunConfig
    from lockstep.core.errors import ConfigError
    from lockstep.report.runlog import check_folder, new_folder, to_json
    from lockstep.training.sweep import compare_recorded, run_sweep
    from lockstep.training.sweep_file import Sweep
    from lockstep.training.time_to_target import check_target

    if resume and out is None:
        raise ConfigError("There is no comparison to resume. Name its folder: --out runs/NAME.")
    if resume and runs:
        raise ConfigError("--resume continues a sweep, and finished runs are compared as they are. Leave one out.")
    check_target(target, is_accuracy=not runs)
    if runs:
        found = compare_recorded(runs)
        found.wanted = target
        if out is not None:
            check_folder(out)
            out.mkdir(parents=True, exist_ok=True)
        with nullcontext(out) if out else new_folder("compare") as folder:
            found.save(folder)
    elif resume and out is not None:
        folder, sweep = out, recorded_sweep(out, given_options(context))
        found = run_sweep(sweep, folder, quiet=quiet, resume=True)
    else:
        grid = {"devices": devices, "batch_size": batch_size, "shards": shards, "optimizer": optimizer}
        grid |= {"exchange": exchange, "engine": engine, **({} if lr is None else {"lr": lr})}
        base = RunConfig(keep_checkpoints=1, **options.config_settings(settings))
        sweep = Sweep(base, {**grid}, scale_batch, target)
        sweep.runs()  # refuses what cannot be before a folder is made
        with nullcontext(out) if out else new_folder("compare") as folder:
            found = run_sweep(sweep, folder, quiet=quiet)
    if json:
        typer.echo(
            to_json(
                {"rows": found.plain(), "target": found.target.value, "sentence": found.sentence(), "out": folder}
                | {"diverged": found.diverged}
            )
        )
        return
    typer.echo(found.text_table(width_of(sys.stdout)))
    if any(row.steady_speed for row in found.rows):
        say("sec/epoch and samples/s are without the first epoch.")
    say(f"{found.sentence()}\n{folder / 'compare.csv'}, {folder / 'compare.png'}")


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options of the sweep that were given on the command line; settings by their names in `RunConfig`."""
    from lockstep.training.sweep_file import LISTS

    own = {*LISTS, "scale_batch", "target"}
    given = {name: value for name, value in context.params.items() if options.is_given(context, name)}
    settings = options.config_settings({name: value for name, value in given.items() if name in SETTINGS})
    return {name: value for name, value in given.items() if name in own} | settings


def recorded_sweep(folder: Path, given: dict[str, Any]) -> "Sweep":
    """The sweep in `folder`, with the options that are given now and do not contradict it. A file never names code."""
    from lockstep.cli.config_file import refuse_code
    from lockstep.training.sweep_file import read_plain, resumed_sweep

    plain = read_plain(folder)
    recorded = {name: value for name, value in plain["settings"].items() if name not in given}
    optimizers = [] if "optimizer" in given else plain["grid"].get("optimizer", [])
    for optimizer in optimizers:
        refuse_code(recorded | {"optimizer": optimizer}, f"The sweep in {folder}")
    refuse_code(recorded, f"The sweep in {folder}")
    return resumed_sweep(folder, plain, given)
