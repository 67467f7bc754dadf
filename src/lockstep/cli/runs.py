"""`lockstep runs`: the runs in a folder, as a table."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.output import say
from lockstep.core.errors import ConfigError
from lockstep.core.terminal import width_of

if TYPE_CHECKING:
    from lockstep.report.run_files import RecordedRun

SORTS: dict[str, Callable[["RecordedRun"], Any]] = {
    "time": lambda run: run.began or 0.0,
    "name": lambda run: run.name,
    "accuracy": lambda run: -1.0 if run.accuracy is None else run.accuracy,
    "speed": lambda run: -(float("inf") if run.seconds_per_epoch is None else run.seconds_per_epoch),
    "status": lambda run: run.status,
}
HEADINGS = (
    "run",
    "started",
    "status",
    "model",
    "data",
    "batch",
    "lr",
    "k",
    "epochs",
    "test acc",
    "sec/epoch",
    "weights",
)
LESS_NEEDED = ("started", "data", "weights", "sec/epoch", "model", "lr", "batch", "k")  # what is left out first


def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look.")] = Path("runs"),
    sort: Annotated[
        str,
        typer.Option(
            help=f"One of: {', '.join(SORTS)}; the latest, the most accurate and the fastest come last.",
            autocompletion=lambda incomplete: [name for name in SORTS if name.startswith(incomplete)],
        ),
    ] = "time",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON array on standard output, an object for each run.")
    ] = False,
) -> None:
    """List the runs in a folder."""
    from lockstep.core.registry import pick
    from lockstep.report.result_tables import narrowed
    from lockstep.report.run_files import find_runs
    from lockstep.report.runlog import to_json

    key = pick(SORTS, sort, "order (--sort)")
    if not os.path.isdir(folder):
        raise ConfigError(
            f"There is no folder {folder}. Train something first: lockstep train; or name another folder."
        )
    found = sorted(find_runs(folder), key=key, reverse=reverse)
    if json:
        typer.echo(to_json([summary(run) for run in found]))
        return
    if not found:
        say(f"There are no runs in {folder}.")
        return
    rows = narrowed([HEADINGS, *(cells(run) for run in found)], width_of(sys.stdout), LESS_NEEDED)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(map(str.ljust, row, widths)).rstrip())


def summary(run: "RecordedRun") -> dict[str, Any]:
    """A run as plain values."""
    return {
        "run": str(run.folder),
        "status": run.status,
        "began": run.began,
        "model": run.config.get("model"),
        "data": run.config.get("data"),
        "batch_size": run.config.get("batch_size"),
        "learning_rate": run.config.get("learning_rate"),
        "devices": run.devices,
        "epochs": len(run.epochs),
        "num_epochs": run.config.get("num_epochs"),
        "test_accuracy": run.accuracy,
        "seconds_per_epoch": run.seconds_per_epoch,
        "incidents": len(run.incidents),
        "weights_sha256": run.weights_sha256 or None,
    }


def cells(run: "RecordedRun") -> tuple[str, ...]:
    """A run as a row of the table."""
    from lockstep.core.files import printable

    plain = summary(run)
    accuracy, seconds = plain["test_accuracy"], plain["seconds_per_epoch"]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began)) if run.began else ""
    texts = (
        plain["run"], when, run.status, plain["model"], Path(str(plain["data"])).name, plain["batch_size"],
        plain["learning_rate"], len(run.devices), f"{plain['epochs']}/{plain['num_epochs']}",
        "" if accuracy is None else f"{accuracy:.4f}", "" if seconds is None else f"{seconds:.2f}",
        run.weights_sha256[:12],
    )  # fmt: skip
    return tuple(printable("" if text is None else str(text)) for text in texts)
