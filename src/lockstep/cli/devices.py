"""`lockstep devices`: what this machine has, and which frameworks can use it."""

from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.backends import BACKENDS, is_installed, load_backend
from lockstep.cli.errors import plain_errors
from lockstep.core.errors import BackendError

if TYPE_CHECKING:
    from rich.table import Table

    from lockstep.backends import Backend
    from lockstep.core.device import Hardware


@plain_errors
def devices(
    backend: Annotated[
        str | None,
        typer.Option(help=f"As this framework sees them: {', '.join(BACKENDS)}. Without it: the first one found."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """List the devices of this machine, the frameworks on it and what they can do."""
    from rich.console import Console

    from lockstep.report.runlog import to_json

    if backend is not None:
        load_backend(backend)  # a wrong name, or one that is not here, is answered before anything else
    found, problems = _load_all()
    chosen = found[backend or next(iter(found))]
    hardware = chosen.hardware()
    if json:
        answer = {
            "backend": chosen.name,
            "version": chosen.version(),
            "devices": [entry._asdict() for entry in hardware],
            "backends": {
                name: {"version": found[name].version(), **found[name].capabilities._asdict()}
                if name in found
                else {"problem": problems[name]}
                for name in BACKENDS
            },
        }
        typer.echo(to_json(answer))
        return
    out = Console(highlight=False, soft_wrap=True)
    out.print(_device_table(hardware))
    out.print(f"\n{_advice(chosen, hardware)}\n")
    out.print(_backend_table(found))
    for name, problem in problems.items():
        out.print(f"{name}: {problem}", markup=False)


def _load_all() -> "tuple[dict[str, Backend], dict[str, str]]":
    """The backends whose framework can be imported, and what is wrong with each of the others."""
    found, problems = {}, {}
    for name in BACKENDS:
        try:
            found[name] = load_backend(name)
        except BackendError as problem:
            missing = f"not installed. To add it: {BACKENDS[name]}"
            problems[name] = str(problem) if is_installed(name) else missing
    return found, problems


def _device_table(hardware: "list[Hardware]") -> "Table":
    from rich.table import Table

    table = Table("device", "name", "memory", "cores", box=None, pad_edge=False)
    for entry in hardware:
        is_gpu = entry.device.kind == "cuda"
        table.add_row(
            str(entry.device) if is_gpu else "cpu:0, cpu:1, ...",
            entry.name,
            f"{entry.num_bytes / 2**30:.0f} GiB",
            f"{entry.num_cores} {'multiprocessors' if is_gpu else 'cores'}" if entry.num_cores else "",
        )
    return table


def _advice(backend: "Backend", hardware: "list[Hardware]") -> str:
    num_gpus, cores = len(hardware) - 1, hardware[-1].num_cores
    if num_gpus:
        advice = f"--devices {num_gpus} uses {'the GPU' if num_gpus == 1 else f'all {num_gpus} GPUs'}."
    else:
        advice = f"No GPU is visible to {backend.name} {backend.version()}."
    return (
        f"{advice} Logical CPU devices: as many as you like; more than {cores} "
        f"share {'the core' if cores == 1 else 'cores'} and bring no speed."
    )


def _backend_table(found: "dict[str, Backend]") -> "Table":
    from rich.table import Table

    table = Table("backend", "version", "GPUs", "compiles", "sees random draws", "engines", box=None, pad_edge=False)
    for name, backend in found.items():
        able = backend.capabilities
        gpus = f"{len(backend.hardware()) - 1} visible" if able.gpus else "cannot"
        flags = (able.compiles, "yes" if able.sees_random_draws else "no")
        table.add_row(name, backend.version(), gpus, *flags, ", ".join(able.engines))
    return table
