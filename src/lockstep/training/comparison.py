"""Runs that were made to be compared: a table, a picture, and what they show in one sentence."""

import csv
import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import field_of
from lockstep.core.errors import RunError
from lockstep.core.files import write_whole
from lockstep.core.settings import option_of
from lockstep.report.events import Result
from lockstep.report.result_tables import html_table, listed_devices, narrowed
from lockstep.training.compared_rows import OWN_COLUMNS, Labels, Row, grouped, joined
from lockstep.training.findings import Findings, best_rows, is_same_task
from lockstep.training.time_to_target import Reached, Target, final_value, reached, target_of, value_of

if TYPE_CHECKING:
    from lockstep.report.plots import Curves, Times

ALWAYS = ("num_shards", "optimizer", "exchange", "engine")  # settings that compare.csv has also where they are equal
LESS_NEEDED = ("devices", "sec/epoch", "weights sha256")  # columns that a narrow terminal has no room for, in order


@dataclass(repr=False)
class Comparison:
    """The runs of a comparison. It shows itself as a table, in a notebook too; `plot()` draws what it shows."""

    rows: list[Row]
    out: Path | None = None
    wanted: float | None = None  # a test accuracy; None: 95 % of the best
    # runs that are no rows, and where their numbers were no longer finite
    diverged: dict[str, str] = field(default_factory=dict)
    _labels: Labels = field(init=False)

    def __post_init__(self) -> None:
        self._labels = Labels(self.rows)

    @property
    def target(self) -> Target:
        """What runs are compared at: how many samples, and how much time, until they were so good.

        There is none where no run has learned anything, or where they were trained on different data.
        """
        found = target_of(self.results, self.wanted)
        return found if self.wanted is not None or is_same_task(self.rows) else found._replace(value=math.nan)

    def reached(self, row: Row) -> Reached | None:
        """What a run needed to reach it; None: it never did."""
        return reached(row.result, self.target)

    def plain(self) -> list[dict[str, Any]]:
        """The rows of the CSV file."""
        return [self._plain_run(row) | self._plain_reached(row) for row in self.rows]

    def _plain_run(self, row: Row) -> dict[str, Any]:
        result, steady = row.result, row.steady_speed
        more = dict.fromkeys((*ALWAYS, *(name for name in self._labels.varying if name not in OWN_COLUMNS)))
        return {
            "num_devices": row.num_devices,
            "batch_size": row.batch_size,
            "learning_rate": row.learning_rate,
            **{option_of(field_of(name)): row.settings.get(name) for name in more},
            "test_accuracy": result.test_accuracy,
            "train_loss": result.history[-1].train_loss if result.history else None,
            "seconds_per_epoch": round(result.seconds_per_epoch, 4),
            "samples_per_second": round(result.samples_per_second, 1),
            "samples_per_second_after_epoch_1": round(steady.samples_per_second, 1) if steady else None,
            "steps": result.steps,
            "weights_sha256": result.weights_sha256,
            "devices": " ".join(result.devices),
            "run": "" if result.run is None else str(result.run),
        }

    def _plain_reached(self, row: Row) -> dict[str, Any]:
        found, target = self.reached(row), self.target
        return {
            "target": round(target.value, 4) if target else None,
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
        return self._labels.of(row, *without)

    def table(self) -> list[tuple[str, ...]]:
        """Headings and rows; a column for each setting that the runs differ in."""
        columns = [self._columns(row) for row in self.rows]
        return [tuple(columns[0]), *(tuple(each.values()) for each in columns)]

    def _columns(self, row: Row) -> dict[str, str]:
        result, target, good = row.result, self.target, self.reached(row)
        speed = row.steady_speed or result
        more = [name for name in self._labels.varying if name not in OWN_COLUMNS]
        found = {"run": row.name} if row.name else {}
        found |= {"k": str(row.num_devices), "batch": str(row.batch_size), "lr": _text(row.learning_rate)}
        found |= {option_of(field_of(name)): _text(row.settings.get(name)) for name in more}
        found["test acc"] = "" if result.test_accuracy is None else f"{result.test_accuracy:.4f}"
        found["sec/epoch"], found["samples/s"] = f"{speed.seconds_per_epoch:.2f}", f"{speed.samples_per_second:,.0f}"
        if target:
            found[f"samples to {target.value:.3g}"] = f"{good.num_samples:,}" if good else "not reached"
            found[f"sec to {target.value:.3g}"] = f"{good.seconds:.2f}" if good else ""
        return found | {"weights sha256": f"{result.weights_sha256[:12]}...", "devices": listed_devices(result.devices)}

    def text_table(self, width: int | None = None) -> str:
        """The table as text; where the lines would be longer than `width`, without the columns that matter least."""
        lines = narrowed(self.table(), width, LESS_NEEDED)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        is_left = [title in ("run", "weights sha256", "devices") for title in lines[0]]
        aligned = [
            [
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, left in zip(line, widths, is_left, strict=True)
            ]
            for line in lines
        ]
        return "\n".join("  ".join(line).rstrip() for line in aligned)

    def __str__(self) -> str:
        return f"{self.text_table()}\n{self.sentence()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{html_table(self.table())}<p>{escape(self.sentence())}</p>"

    def plot(self) -> Any:
        """How good with which learning rate (or after which epoch), and how long it took to be good."""
        from lockstep.report.plots import comparison_figure  # matplotlib takes half a second to load

        return comparison_figure(self._curves(), self._times(), self._caption())

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
        """What the runs show, in one sentence; those that have diverged in another."""
        found = Findings(self.rows, self._labels, self.target).sentence()
        if self.diverged:
            found += f" Diverged: {with_reasons(self.diverged)}."
        return found

    def _curves(self) -> "Curves":
        """How good, against the learning rate where there are several, else against the epoch."""
        from lockstep.report.plots import Curves, Line

        is_accuracy = self.target.is_accuracy
        what = "test accuracy" if is_accuracy else "training loss"
        found: dict[tuple[Any, ...], list[str]] = {}  # runs with the same numbers are one line
        if self._has_several_rates:
            for label, rows in grouped(self.rows, lambda row: self.label(row, "run", "learning_rate")).items():
                rows.sort(key=lambda row: row.learning_rate or 0.0)
                points = tuple((row.learning_rate, final_value(row.result, is_accuracy)) for row in rows)
                found.setdefault(points, []).append(label)
            titles = "learning rate", f"{what} after the last epoch"
        else:
            for row in self.rows:
                values = [value_of(done, is_accuracy) for done in row.result.history]
                found.setdefault(tuple(enumerate(values, 1)), []).append(self.label(row))
            titles = "epoch", what
        lines = [Line(joined(names), *zip(*points, strict=True)) for points, names in found.items() if points]
        return Curves(lines, *titles)

    @property
    def _has_several_rates(self) -> bool:
        rates = {row.learning_rate for row in self.rows}
        return len(rates) > 1 and None not in rates

    def _times(self) -> "Times | None":
        """How long until each setting was good enough, with its best learning rate; None where there is no target."""
        from lockstep.report.plots import TargetBar, Times

        if not self.target:
            return None
        without = ("run", "learning_rate") if self._has_several_rates else ()
        bars = []
        for rows in grouped(self.rows, lambda row: self.label(row, *without)).values():
            best = best_rows(rows, self.target.is_accuracy) or rows
            times = [good for row in best if (good := self.reached(row)) is not None]
            good = min(times, key=lambda each: each.num_samples, default=None)
            bars.append(
                TargetBar(joined(list(map(self.label, best))), good and good.seconds, good and good.num_samples)
            )
        which = ", with the best learning rate of each" if self._has_several_rates else ""
        return Times(f"time to {self.target}{which}", bars)

    def _caption(self) -> Any:
        from lockstep.report.run_picture import common_caption

        return common_caption([row.settings for row in self.rows], self.results)


def _text(value: Any) -> str:
    """A setting in the table."""
    return "default" if value is None else str(value)


def with_reasons(diverged: dict[str, str]) -> str:
    """Runs that have diverged, each with where it has."""
    return "; ".join(f"{name} ({why})" for name, why in diverged.items())
