"""`lockstep bench`: our step against others on the same model, data, batch and devices, and our exchanges."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options

MODELS = ("lenet", "mlp", "resnet18", "transformer", "gpt2", "bert", "resnet50", "vit-b-16")
CONTENDERS = (
    "lockstep-1-device", "lockstep-compiled", "lockstep-1-shard", "lockstep-2-shards", "lockstep-4-shards",
    "lockstep-16-shards", "text", "text-in-memory", "ddp", "ddp-best", "ddp-compiled", "fabric", "accelerate",
)  # fmt: skip


@options.with_settings("devices", "data_dir")
def bench(
    *,
    models: Annotated[
        str,
        typer.Option(help=f"Models, comma-separated: {', '.join(MODELS)}."),
    ] = "lenet,resnet18,transformer",
    only: Annotated[
        str | None,
        typer.Option(
            help=f"Contenders, comma-separated: {', '.join(CONTENDERS)}. lockstep is always measured.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials of each contender; a median needs 5 or more.")] = 5,
    steps: Annotated[
        int | None, typer.Option(help="Steps of a trial. Default: depends on the model.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Samples of a step. Default: 256, but 64 for resnet18 on CPUs.", show_default=False),
    ] = None,
    precision: Annotated[
        str, typer.Option(help="fp32, tf32 or bf16, as in `lockstep train`; lenet always uses fp32.")
    ] = "fp32",
    data: Annotated[str, typer.Option(help="The images: fashion-mnist or fashion-mnist-mini.")] = "fashion-mnist",
    more: Annotated[
        list[str] | None,
        typer.Option("--set", help="More settings of our own run, like exchange=tree.", show_default=False),
    ] = None,
    exchanges: Annotated[bool, typer.Option(help="Measure the exchanges against all_reduce too.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results and the plot. Default: a new one below runs/.", show_default=False),
    ] = None,
    json: options.Json = False,
    **settings: Any,
) -> None:
    """Benchmark a training step against DDP, Fabric and Accelerate."""
    from lockstep.bench.run import check_writable, run_bench, save_results
    from lockstep.bench.workload import parse_settings
    from lockstep.core.errors import RunError
    from lockstep.report.runlog import new_folder, to_json

    check_writable(Path("runs") if out is None else out)
    result, tables = run_bench(
        devices=settings["devices"],
        models=models,
        only=only,
        num_trials=trials,
        exchanges=exchanges,
        command=" ".join(["lockstep", *sys.argv[1:]]),
        log=lambda line: print(line, file=sys.stderr, flush=True),
        num_steps=steps,
        batch_size=batch_size,
        precision=precision,
        data=data,
        data_dir=None if settings["data_dir"] is None else str(settings["data_dir"].resolve()),
        settings=parse_settings(more or []),
    )
    with nullcontext(out) if out else new_folder("bench") as folder:
        paths = save_results(result, tables, folder)
    if json:
        typer.echo(to_json(result))
    else:
        for table in tables:
            typer.echo(f"{table.text()}\n")
        typer.echo("lockstep is 1.00x; what takes twice as long as it is 2.00x.")
        typer.echo("\n".join(map(str, paths)))
    if missing := [table.title for table in tables if table.reference_row() is None]:
        raise RunError(f"there is nothing to compare the others with in: {'; '.join(missing)}. See what failed above.")
