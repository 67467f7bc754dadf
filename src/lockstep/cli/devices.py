"""`lockstep devices`: what this machine has."""

from typing import Annotated

import typer

from lockstep.cli import options
from lockstep.cli.answers import plain_answers


@plain_answers
def devices(
    backend: options.Backend = "torch",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the devices of this machine."""
    from rich.console import Console
    from rich.table import Table

    from lockstep.backends import load_backend
    from lockstep.report.runlog import to_json

    chosen = load_backend(backend)
    found = chosen.hardware()
    if json:
        rows = [entry._asdict() for entry in found]
        typer.echo(to_json({"backend": chosen.name, "version": chosen.version(), "devices": rows}))
        return
    table = Table("device", "name", "memory", "cores", box=None, pad_edge=False)
    for entry in found:
        is_gpu = entry.device.kind == "cuda"
        table.add_row(
            str(entry.device) if is_gpu else "cpu:0, cpu:1, ...",
            entry.name,
            f"{entry.num_bytes / 2**30:.0f} GiB",
            f"{entry.num_cores} {'multiprocessors' if is_gpu else 'cores'}",
        )
    out = Console(highlight=False, soft_wrap=True)
    out.print(table)
    num_gpus = len(found) - 1
    cores = found[-1].num_cores
    if num_gpus:
        advice = f"--devices {num_gpus} uses {'the GPU' if num_gpus == 1 else f'all {num_gpus} GPUs'}."
    else:
        advice = f"No GPU is visible to {chosen.name} {chosen.version()}."
    out.print(
        f"\n{advice} Logical CPU devices: as many as you like; more than {cores} "
        f"share {'the core' if cores == 1 else 'cores'} and bring no speed."
    )
