"""Runs that were made to be compared: a table, a picture, and what they show in one sentence."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.backends.hardware import cpu
from lockstep.config import field_of
from lockstep.core.errors import RunError
from lockstep.core.settings import option_of
from lockstep.report.events import Result
from lockstep.report.result_tables import html_table
from lockstep.report.runlog import write_whole
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.training.time_to_target import Reached, Target, reached, target_of, value_of

if TYPE_CHECKING:
    from lockstep.report.plots import Line
    from lockstep.report.plots import Target as TimeBar

MORE = ("num_shards", "optimizer", "exchange", "engine")  # settings that are shown where the runs differ in them


class Row(NamedTuple):
    """One run of a comparison."""

    num_devices: int
    batch_size: int
    learning_rate: float | None
    more: dict[str, Any]  # those of `MORE`
    result: Result

    @property
    def accuracy(self) -> float:
        """The test accuracy; -1 where there are no test samples."""
        return -1.0 if self.result.test_accuracy is None else self.result.test_accuracy

    def plain(self) -> dict[str, Any]:
        """The row of the CSV file."""
        result = self.result
        return {
            "num_devices": self.num_devices,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
            **{option_of(field_of(name)): value for name, value in self.more.items()},
            "test_accuracy": result.test_accuracy,
            "train_loss": result.history[-1].train_loss if result.history else None,
            "seconds_per_epoch": round(result.seconds_per_epoch, 4),
            "samples_per_second": round(result.samples_per_second, 1),
            "steps": result.steps,
            "weights_sha256": result.weights_sha256,
            "devices": " ".join(result.devices),
            "run": "" if result.run is None else str(result.run),
        }


@dataclass(repr=False)
class Comparison:
    """The runs of a comparison. It shows itself as a table, in a notebook too; `plot()` draws what it shows."""

    rows: list[Row]
    out: Path | None = None
    wanted: float | None = None  # a test accuracy; None: 95 % of the best
    _names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = [name for name in MORE if len({row.more[name] for row in self.rows}) > 1]

    @property
    def target(self) -> Target:
        """What runs are compared at: how many samples, and how much time, until they were so good."""
        return target_of(self.results, self.wanted)

    def reached(self, row: Row) -> Reached | None:
        """What a run needed to reach it; None: it never did."""
        return reached(row.result, self.target)

    def plain(self) -> list[dict[str, Any]]:
        """The rows of the CSV file."""
        return [row.plain() | self._plain_reached(row) for row in self.rows]

    def _plain_reached(self, row: Row) -> dict[str, Any]:
        found, target = self.reached(row), self.target
        return {
            "target": round(target.value, 4),
            "target_of": "test_accuracy" if target.is_accuracy else "train_loss",
            "epochs_to_target": found.num_epochs if found else None,
            "samples_to_target": found.num_samples if found else None,
            "seconds_to_target": round(found.seconds, 4) if found else None,
        }

    @property
    def results(self) -> list[Result]:
        """The results of the runs."""
        return [row.result for row in self.rows]

    def label(self, row: Row, *without: str) -> str:
        """A name for a run: what it has that others do not."""
        parts = {"num_devices": f"k={row.num_devices}", "batch_size": f"batch {row.batch_size}"}
        parts["learning_rate"] = f"lr {row.learning_rate!r}"
        varying = {name for name in parts if len({getattr(each, name) for each in self.rows}) > 1} or {"num_devices"}
        parts = {name: text for name, text in parts.items() if name in varying and name not in without}
        parts |= {name: f"{option_of(field_of(name))} {row.more[name]}" for name in self._names if name not in without}
        return ", ".join(parts.values())

    def table(self) -> list[tuple[str, ...]]:
        """Headings and rows."""
        more = [option_of(field_of(name)) for name in self._names]
        to = f"to {self.target.value:.3g}"
        titles = ("test acc", "sec/epoch", "samples/s", f"samples {to}", f"sec {to}", "weights sha256", "devices")
        found = [("k", "batch", "lr", *more, *titles)]
        for row in self.rows:
            result = row.result
            accuracy = "" if result.test_accuracy is None else f"{row.accuracy:.4f}"
            speed = f"{result.seconds_per_epoch:.2f}", f"{result.samples_per_second:,.0f}"
            run = str(row.num_devices), str(row.batch_size), repr(row.learning_rate)
            own = tuple(str(row.more[name]) for name in self._names)
            ends = f"{result.weights_sha256[:12]}...", ", ".join(result.devices)
            good = self.reached(row)
            needed = (f"{good.num_samples:,}", f"{good.seconds:.2f}") if good else ("not reached", "")
            found.append((*run, *own, accuracy, *speed, *needed, *ends))
        return found

    def __str__(self) -> str:
        lines = self.table()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        numbers = ["  ".join(map(str.rjust, line[:-2], widths)) for line in lines]
        names = [f"{line[-2].ljust(widths[-2])}  {line[-1]}" for line in lines]
        return "\n".join([*map("  ".join, zip(numbers, names, strict=True)), self.sentence()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{html_table(self.table())}<p>{escape(self.sentence())}</p>"

    def plot(self) -> Any:
        """How good with which learning rate (or after which epoch), and how long it took to be good."""
        from lockstep.report.plots import comparison_figure  # matplotlib takes half a second to load

        lines, labels = self._lines(self.target.is_accuracy)
        return comparison_figure(lines, labels, self._bars(), f"time to {self.target}, best learning rates")

    def save(self, folder: Path) -> None:
        """Writes compare.csv and compare.png."""

        def write_csv(path: Path) -> None:
            with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as out:
                rows = self.plain()
                writer = csv.DictWriter(out, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)

        try:
            write_whole(folder / "compare.csv", write_csv)
            write_whole(folder / "compare.png", lambda path: self.plot().savefig(path, dpi=150, format="png"))
        except OSError as problem:
            why = f"{problem.strerror}. The runs in it are complete"
            raise RunError(f"{folder} cannot be written to: {why}.") from problem

    def sentence(self) -> str:
        """What the runs show, in one sentence."""
        found = self._same_weights() + self._speed() + self._cores() + self._best_rates() + self._first_at_target()
        best = max(self.rows, key=lambda row: row.accuracy)
        if best.result.test_accuracy is not None:
            found.append(f"the best test accuracy is {best.accuracy:.4f} ({self.label(best)})")
        text = "; ".join(found) or "there are no test samples to compare the runs by"
        return text[0].upper() + text[1:] + "."

    def _lines(self, has_accuracy: bool) -> tuple[list["Line"], tuple[str, str]]:
        from lockstep.report.plots import Line

        what = "test accuracy" if has_accuracy else "training loss"
        rates = {row.learning_rate for row in self.rows}
        found: dict[tuple[Any, ...], list[str]] = {}  # runs with the same numbers are one line
        if len(rates) > 1 and None not in rates:
            for label, rows in self._grouped(self.rows, lambda row: self.label(row, "learning_rate")).items():
                rows.sort(key=lambda row: row.learning_rate or 0.0)
                points = tuple((row.learning_rate, _final(row, has_accuracy)) for row in rows)
                found.setdefault(points, []).append(label)
            labels = ("learning rate", f"{what} after the last epoch")
        else:
            for row in self.rows:
                values = [value_of(done, has_accuracy) for done in row.result.history]
                found.setdefault(tuple(enumerate(values, 1)), []).append(self.label(row))
            labels = ("epoch", what)
        return [Line(_joined(names), *zip(*points, strict=True)) for points, names in found.items()], labels

    def _bars(self) -> list["TimeBar"]:
        """For each setting but the learning rate, of which the best is taken: how long until it was good enough."""
        from lockstep.report.plots import Target as TimeBar

        is_accuracy, found = self.target.is_accuracy, []
        for rows in self._grouped(self.rows, lambda row: self.label(row, "learning_rate")).values():
            times = [(good, row) for row in rows if (good := self.reached(row)) is not None]
            best = min(rows, key=lambda row: -_final(row, True) if is_accuracy else _final(row, False))
            good, row = min(times, key=lambda each: each[0].seconds, default=(None, best))
            found.append(TimeBar(self.label(row), good and good.seconds, good and good.num_samples))
        return found

    def _first_at_target(self) -> list[str]:
        """Who was good first, and who needed the fewest samples: larger batches are faster, and learn less from one."""
        times = [(good, row) for row in self.rows if (good := self.reached(row)) is not None]
        if len(self.rows) < 2 or not times:
            return []
        fast, of_fast = min(times, key=lambda each: each[0].seconds)
        few, of_few = min(times, key=lambda each: each[0].num_samples)
        said = f"{self.target} was reached first by {self.label(of_fast)}: {fast.num_samples:,} samples, "
        said += f"{fast.seconds:.2f} s"
        if few.num_samples < fast.num_samples:
            said += f" ({self.label(of_few)} needed {few.num_samples:,} samples and {few.seconds:.2f} s)"
        return [said]

    def _same_weights(self) -> list[str]:
        """Whether runs that differ in devices and engine only have the same weights."""
        keys = ("num_shards", "optimizer", "exchange")
        groups = self._grouped(self.rows, lambda row: (row.batch_size, row.learning_rate, *(row.more[n] for n in keys)))
        several = [group for group in groups.values() if len({row.num_devices for row in group}) > 1]
        for group in several:
            if len({row.result.weights_sha256 for row in group}) > 1:
                exchange = group[0].more["exchange"]
                why = f"because {exchange} adds in an order of its own"
                if exchange in KEEPS_THE_TREE:
                    why = "which must not happen: please report it"
                return [f"with batch {group[0].batch_size} the number of devices changed the weights, {why}"]
        counts = sorted({row.num_devices for group in several for row in group})
        what = "devices end with the same weights, bit for bit"
        return [f"with the same batch and learning rate, {_and(counts)} {what}"] if counts else []

    def _speed(self) -> list[str]:
        """The throughput of the largest number of devices against the smallest, at equal batch and settings."""
        ratios: dict[tuple[int, int], list[float]] = {}
        for group in self._grouped(self.rows, lambda row: (row.batch_size, *row.more.values())).values():
            by_count = self._grouped(group, lambda row: row.num_devices)
            few, many = min(by_count), max(by_count)
            if few < many:
                slow, fast = (median(row.result.samples_per_second for row in by_count[k]) for k in (few, many))
                ratios.setdefault((few, many), []).append(fast / slow)
        return [
            f"{many} devices train {median(found):.2f} times as many samples a second as {few}, a scaling efficiency "
            f"of {100 * median(found) * few / many:.0f}%"
            for (few, many), found in ratios.items()
        ]

    def _cores(self) -> list[str]:
        most = max((row for row in self.rows), key=lambda row: row.num_devices)
        num_cores = cpu().num_cores
        if most.num_devices <= num_cores or not most.result.devices[0].startswith("cpu"):
            return []
        return [f"{most.num_devices} logical CPU devices share {num_cores} cores: more than {num_cores} bring no speed"]

    def _best_rates(self) -> list[str]:
        """The best learning rate for each batch size, where there are several of both."""
        by_size = self._grouped(self.rows, lambda row: row.batch_size)
        if len(by_size) < 2 or len({row.learning_rate for row in self.rows}) < 2:
            return []
        best = [max(by_size[size], key=lambda row: row.accuracy) for size in sorted(by_size)]
        rates = _and([f"{row.learning_rate!r} for batch {row.batch_size}" for row in best])
        return [f"the best learning rate is {rates}"]

    @staticmethod
    def _grouped(rows: list[Row], key: Any) -> dict[Any, list[Row]]:
        groups: dict[Any, list[Row]] = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row)
        return groups


def _final(row: Row, has_accuracy: bool) -> float:
    return row.accuracy if has_accuracy else row.result.history[-1].train_loss


def _joined(names: list[str]) -> str:
    """The names of runs that have the same numbers, as one: what they have in common is said once.

    >>> _joined(["k=1, batch 256", "k=2, batch 256"])
    'k=1 and k=2, batch 256'
    """
    parts = [name.split(", ") for name in names]
    if len({len(each) for each in parts}) > 1:
        return "; ".join(names)
    columns = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
    if prod(map(len, columns)) != len(names):  # not every combination is among them
        return "; ".join(names)
    return ", ".join(map(_and, columns))


def _and(parts: Iterable[Any]) -> str:
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}" if most else last
