"""A sweep of runs, compared: device counts, batch sizes and learning rates, the text's first and second exercises."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from lockstep.backends import devices_for, load_backend
from lockstep.config import RunConfig, check_batch, check_ranks
from lockstep.core.errors import ConfigError, RunError
from lockstep.report.console import fetch_progress
from lockstep.report.events import Result
from lockstep.report.plots import draw_curves
from lockstep.report.runlog import check_folder, write_whole
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.training.run import run
from lockstep.training.setup import prepare

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Row:
    """One run of the sweep."""

    num_devices: int
    batch_size: int
    learning_rate: float | None
    exchange: str
    result: Result

    @property
    def accuracy(self) -> float:
        """The test accuracy; below all others where there is none."""
        return -1.0 if self.result.test_accuracy is None else self.result.test_accuracy

    @property
    def label(self) -> str:
        """What sets the run apart."""
        return f"k={self.num_devices}, batch {self.batch_size}, lr {self.learning_rate!r}"

    def plain(self) -> dict[str, Any]:
        """The row as it stands in the CSV file."""
        return {
            "num_devices": self.num_devices,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "test_accuracy": self.result.test_accuracy,
            "seconds_per_epoch": round(self.result.seconds_per_epoch, 4),
            "samples_per_second": round(self.result.samples_per_second, 1),
            "steps": self.result.steps,
            "weights_sha256": self.result.weights_sha256,
            "devices": " ".join(self.result.devices),
        }


def make_sweep(
    base: RunConfig, devices: str, batch_sizes: str, learning_rates: str, scale_batch: bool
) -> list[RunConfig]:
    """The runs of the sweep, all of them checked, ordered so that runs to compare stand next to each other.

    All run on one kind of device: on GPUs if there are enough for the largest number, else on logical CPU devices.
    """
    counts = _numbers(devices, int, "--devices", "1,2")
    sizes = _numbers(batch_sizes, int, "--batch-size", "128,256")
    rates = _numbers(learning_rates, float, "--lr", "0.1,0.2,0.4")
    for count in counts:
        if count < 1:
            raise ConfigError(f"--devices {devices}: {count} is not a number of devices. Write numbers from 1 on: 1,2.")
        check_ranks(count, base.num_shards)
    most = devices_for(load_backend(base.backend), max(counts))
    return [
        replace(
            base,
            devices=",".join(most[:k]),
            batch_size=k * size if scale_batch else size,
            learning_rate=rate,
        )
        for size, rate, k in product(sizes, rates, counts)
    ]


def _numbers(text: str, kind: Callable[[str], N], option: str, example: str) -> list[N]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as wrong:
        raise ConfigError(f"{option} {text}: not a list of numbers. Write them with commas: {example}.") from wrong


def run_sweep(sweep: list[RunConfig], folder: Path, quiet: bool = False) -> list[Row]:
    """Trains every run of the sweep, each recorded in a folder of its own below `folder`."""
    check_folder(folder)
    with fetch_progress() as progress:
        num_train = prepare(sweep[0], progress=progress).task.num_train
    for config in sweep:
        check_batch(config.batch_size, num_train, config.data)
    rows = []
    for config in sweep:
        num_devices = str(config.devices).count(",") + 1
        name = f"k{num_devices}-batch{config.batch_size}-lr{config.learning_rate!r}"
        result = run(replace(config, out=folder / name), quiet=quiet)
        rows.append(Row(num_devices, config.batch_size, config.learning_rate, config.exchange, result))
    return rows


def save_sweep(rows: list[Row], folder: Path) -> None:
    """Writes compare.csv and compare.png."""

    def write_csv(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, fieldnames=list(rows[0].plain()))
            writer.writeheader()
            writer.writerows(row.plain() for row in rows)

    try:
        write_whole(folder / "compare.csv", write_csv)
        write_whole(folder / "compare.png", lambda path: draw_curves({r.label: r.result.history for r in rows}, path))
    except OSError as problem:
        raise RunError(f"{folder} cannot be written to: {problem.strerror}. The runs in it are whole.") from problem


def table(rows: list[Row]) -> str:
    """The rows as a table for the terminal."""
    grid = Table(box=None, pad_edge=False)
    for heading in ("k", "batch", "lr", "test acc", "sec/epoch", "samples/s"):
        grid.add_column(heading, justify="right")
    grid.add_column("weights sha256")
    grid.add_column("devices")
    for row in rows:
        grid.add_row(
            str(row.num_devices),
            str(row.batch_size),
            f"{row.learning_rate!r}",
            "" if row.result.test_accuracy is None else f"{row.accuracy:.4f}",
            f"{row.result.seconds_per_epoch:.2f}",
            f"{row.result.samples_per_second:,.0f}",
            f"{row.result.weights_sha256[:12]}...",
            ", ".join(row.result.devices),
        )
    out = Console(width=200, highlight=False)
    with out.capture() as captured:
        out.print(grid)
    return captured.get().rstrip("\n")


def sentence(rows: list[Row]) -> str:
    """What the table shows, in one sentence."""
    said = _same_weights(rows) + _time(rows) + _best_rates(rows)
    best = max(rows, key=lambda row: row.accuracy)
    if best.result.test_accuracy is not None:
        said.append(f"the best test accuracy is {best.accuracy:.4f} ({best.label})")
    text = "; ".join(said) or "there are no test samples to compare the runs by"
    return text[0].upper() + text[1:] + "."


def _same_weights(rows: list[Row]) -> list[str]:
    """Runs that differ in the number of devices only must agree bit for bit."""
    groups: dict[tuple[int, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.batch_size, row.learning_rate), []).append(row)
    shared = [group for group in groups.values() if len(group) > 1]
    if not shared:
        return []
    apart = [group for group in shared if len({row.result.weights_sha256 for row in group}) > 1]
    if apart:
        said = f"with batch {apart[0][0].batch_size} the number of devices changed the weights"
        if apart[0][0].exchange in KEEPS_THE_TREE:
            return [f"{said}, which must not happen: please report it"]
        return [f"{said}, because {apart[0][0].exchange} adds in an order of its own"]
    counts = sorted({row.num_devices for group in shared for row in group})
    return [f"with the same batch and learning rate, {_and(counts)} devices end with the same weights, bit for bit"]


def _time(rows: list[Row]) -> list[str]:
    """Samples a second on the most devices against the fewest."""
    speeds: dict[int, list[float]] = {}
    for row in rows:
        speeds.setdefault(row.num_devices, []).append(row.result.samples_per_second)
    if len(speeds) < 2:
        return []
    few, many = min(speeds), max(speeds)
    ratio = (sum(speeds[many]) / len(speeds[many])) / (sum(speeds[few]) / len(speeds[few]))
    return [f"{many} devices train {ratio:.2f} times as many samples a second as {few}"]


def _best_rates(rows: list[Row]) -> list[str]:
    """The best learning rate for each batch size, where there is a choice of both."""
    by_size: dict[int, list[Row]] = {}
    for row in rows:
        by_size.setdefault(row.batch_size, []).append(row)
    if len(by_size) < 2 or len({row.learning_rate for row in rows}) < 2:
        return []
    best = {size: max(group, key=lambda row: row.accuracy) for size, group in sorted(by_size.items())}
    return [
        "the best learning rate is " + _and([f"{row.learning_rate!r} for batch {size}" for size, row in best.items()])
    ]


def _and(parts: list[Any]) -> str:
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}" if most else last
