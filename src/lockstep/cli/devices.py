"""`lockstep devices`: what this machine has, and which frameworks can use it."""

from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.backends import BACKENDS, is_installed, load_backend
from lockstep.cli import options
from lockstep.cli.output import say
from lockstep.core.errors import BackendError

if TYPE_CHECKING:
    from lockstep.backends import Backend
    from lockstep.core.device import Hardware


def devices(
    backend: Annotated[
        str | None,
        typer.Option(help=f"The framework to ask: {', '.join(BACKENDS)}. Default: the first one installed."),
    ] = None,
    json: options.Json = False,
) -> None:
    """List the devices and frameworks of this machine."""
    from lockstep.report.runlog import to_json

    if backend is not None:
        load_backend(backend)  # refuses a wrong name, or a framework that is not installed
    found: dict[str, Backend] = {}
    problems: dict[str, str] = {}
    for name, install in BACKENDS.items():
        try:
            found[name] = load_backend(name)
        except BackendError as problem:
            problems[name] = str(problem) if is_installed(name) else f"not installed. To add it: {install}"
    chosen = found[backend or next(iter(found))]
    hardware = chosen.hardware()
    if json:
        able = {n: {"version": found[n].version(), **found[n].capabilities._asdict()} for n in found}
        backends = {name: able.get(name) or {"problem": problems[name]} for name in BACKENDS}
        about = {"backend": chosen.name, "version": chosen.version()}
        typer.echo(to_json({**about, "devices": [entry._asdict() for entry in hardware], "backends": backends}))
        return
    say(_table([("device", "name", "memory", "cores"), *map(_device_row, hardware)]))
    say(f"\n{_advice(chosen, hardware)}\n")
    headings = ("backend", "version", "GPUs", "compiles", "random draws", "engines")
    say(_table([headings, *map(_backend_row, found.values())]))
    for name, why in problems.items():
        say(f"{name}: {why}")


def _table(rows: list[tuple[str, ...]]) -> str:
    """Rows of text in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _device_row(entry: "Hardware") -> tuple[str, ...]:
    is_gpu = entry.device.kind == "cuda"
    cores = f"{entry.num_cores} {'multiprocessors' if is_gpu else 'cores'}" if entry.num_cores else ""
    name = str(entry.device) if is_gpu else "cpu:0, cpu:1, ..."
    return name, entry.name, f"{entry.num_bytes / 2**30:.0f} GiB", cores


def _backend_row(backend: "Backend") -> tuple[str, ...]:
    able = backend.capabilities
    gpus = f"{len(backend.hardware()) - 1} visible" if able.gpus else "no"
    draws = "detected" if able.sees_random_draws else "not detected"
    return backend.name, backend.version(), gpus, able.compiles, draws, ", ".join(able.engines)


def _advice(backend: "Backend", hardware: "list[Hardware]") -> str:
    num_gpus, num_cores = len(hardware) - 1, hardware[-1].num_cores
    gpus = f"No GPU is visible to {backend.name} {backend.version()}."
    if num_gpus:
        them = "the GPU" if num_gpus == 1 else f"all {num_gpus} GPUs"
        gpus = f"--devices {num_gpus} uses {them}; a larger number lists {'it' if num_gpus == 1 else 'them'} again."
    return f"{gpus} Logical CPU devices: as many as you like; more than {num_cores} share cores and bring no speed."
