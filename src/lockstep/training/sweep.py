"""A sweep of runs, compared: device counts, batch sizes and learning rates, the text's first and second exercises."""

import csv
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TypeVar

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


class Row(NamedTuple):
    """One run of the sweep."""

    num_devices: int
    batch_size: int
    learning_rate: float | None
    exchange: str
    result: Result

    @property
    def accuracy(self) -> float:
        """The test accuracy; -1 where there are no test samples."""
        return -1.0 if self.result.test_accuracy is None else self.result.test_accuracy

    @property
    def label(self) -> str:
        """The name of the run in the plot."""
        return f"k={self.num_devices}, batch {self.batch_size}, lr {self.learning_rate!r}"

    def plain(self) -> dict[str, Any]:
        """The row of the CSV file."""
        result = self.result
        return {
            "num_devices": self.num_devices,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            "test_accuracy": result.test_accuracy,
            "seconds_per_epoch": round(result.seconds_per_epoch, 4),
            "samples_per_second": round(result.samples_per_second, 1),
            "steps": result.steps,
            "weights_sha256": result.weights_sha256,
            "devices": " ".join(result.devices),
        }

    def cells(self) -> tuple[str, ...]:
        """The row of the table on the terminal."""
        result = self.result
        accuracy = "" if result.test_accuracy is None else f"{self.accuracy:.4f}"
        speed = f"{result.seconds_per_epoch:.2f}", f"{result.samples_per_second:,.0f}"
        run = str(self.num_devices), str(self.batch_size), repr(self.learning_rate)
        return *run, accuracy, *speed, f"{result.weights_sha256[:12]}...", ", ".join(result.devices)


def make_sweep(base: RunConfig, devices: str, batch_sizes: str, lrs: str, scale_batch: bool) -> list[RunConfig]:
    """The runs of the sweep, checked; those that differ in the number of devices only follow each other.

    All run on one kind of device: on GPUs if there are enough for the largest number, else on logical CPU devices.
    """
    counts = _numbers(devices, int, "--devices", "1,2")
    sizes = _numbers(batch_sizes, int, "--batch-size", "128,256")
    rates = _numbers(lrs, float, "--lr", "0.1,0.2,0.4")
    for count in counts:
        if count < 1:
            raise ConfigError(f"--devices {devices}: {count} is not a number of devices. Write numbers from 1 on: 1,2.")
        check_ranks(count, base.num_shards)
    most = devices_for(load_backend(base.backend), max(counts))
    return [
        replace(base, devices=",".join(most[:k]), batch_size=k * size if scale_batch else size, learning_rate=rate)
        for size, rate, k in product(sizes, rates, counts)
    ]


def _numbers(text: str, kind: Callable[[str], N], option: str, example: str) -> list[N]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as wrong:
        raise ConfigError(f"{option} {text}: not a list of numbers. Write them with commas: {example}.") from wrong


def run_sweep(sweep: list[RunConfig], folder: Path, quiet: bool = False) -> list[Row]:
    """The results of all runs, each recorded in a subfolder of `folder`."""
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
        raise RunError(f"{folder} cannot be written to: {problem.strerror}. The runs in it are complete.") from problem


def table(rows: list[Row]) -> str:
    """The rows as a table for the terminal."""
    headings = ("k", "batch", "lr", "test acc", "sec/epoch", "samples/s", "weights sha256", "devices")
    lines = [headings, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = ["  ".join(map(str.rjust, line[:-2], widths)) for line in lines]
    names = [f"{line[-2].ljust(widths[-2])}  {line[-1]}" for line in lines]
    return "\n".join(map("  ".join, zip(numbers, names, strict=True)))


def sentence(rows: list[Row]) -> str:
    """What the table shows, in one sentence."""
    found = _same_weights(rows) + _speed(rows) + _best_rates(rows)
    best = max(rows, key=lambda row: row.accuracy)
    if best.result.test_accuracy is not None:
        found.append(f"the best test accuracy is {best.accuracy:.4f} ({best.label})")
    text = "; ".join(found) or "there are no test samples to compare the runs by"
    return text[0].upper() + text[1:] + "."


def _same_weights(rows: list[Row]) -> list[str]:
    """Whether runs that differ in the number of devices only have the same weights."""
    groups = [group for group in _grouped(rows, "batch_size", "learning_rate").values() if len(group) > 1]
    for group in groups:
        if len({row.result.weights_sha256 for row in group}) > 1:
            why = f"because {group[0].exchange} adds in an order of its own"
            if group[0].exchange in KEEPS_THE_TREE:
                why = "which must not happen: please report it"
            return [f"with batch {group[0].batch_size} the number of devices changed the weights, {why}"]
    counts = sorted({row.num_devices for group in groups for row in group})
    what = "devices end with the same weights, bit for bit"
    return [f"with the same batch and learning rate, {_and(counts)} {what}"] if counts else []


def _speed(rows: list[Row]) -> list[str]:
    """The throughput of the largest number of devices against that of the smallest."""
    by_count = _grouped(rows, "num_devices")
    if len(by_count) < 2:
        return []
    few, many = min(by_count), max(by_count)
    slow, fast = (mean(row.result.samples_per_second for row in by_count[count]) for count in (few, many))
    return [f"{many} devices train {fast / slow:.2f} times as many samples a second as {few}"]


def _best_rates(rows: list[Row]) -> list[str]:
    """The best learning rate for each batch size, where there are several of both."""
    by_size = _grouped(rows, "batch_size")
    if len(by_size) < 2 or len(_grouped(rows, "learning_rate")) < 2:
        return []
    best = [max(by_size[size], key=lambda row: row.accuracy) for size in sorted(by_size)]
    return [f"the best learning rate is {_and([f'{row.learning_rate!r} for batch {row.batch_size}' for row in best])}"]


def _grouped(rows: list[Row], *names: str) -> dict[Any, list[Row]]:
    """The rows by the value of an attribute, or of several."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(attrgetter(*names)(row), []).append(row)
    return groups


def _and(parts: list[Any]) -> str:
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}" if most else last
