"""Tables of times: medians, ranges, ratios, and how they look on the terminal and in the results."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from lockstep.core.random_state import random_state_kept

with random_state_kept():
    from rich.console import Console
    from rich.table import Table as Grid


class Spread(NamedTuple):
    """The median of several values, and their range."""

    median: float
    lowest: float
    highest: float


def spread(values: list[float]) -> Spread:
    """The spread of at least one value.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, lowest=1.0, highest=3.0)
    """
    return Spread(median(values), min(values), max(values))


@dataclass
class Row:
    """One contender."""

    name: str
    about: str = ""
    seconds: list[float] = field(default_factory=list)  # of a step or an exchange, one for each trial
    chosen: str = ""  # settings that it found to be the fastest
    losses: list[float] = field(default_factory=list)  # of each trial's last step
    weights_sha256: str | None = None
    problem: str = ""  # why it has no times, or not all of them
    peak_bytes: int = 0  # of GPU memory, beside samples that are there, of the process that used most

    @property
    def is_measured(self) -> bool:
        """Whether it has all of its times."""
        return bool(self.seconds) and not self.problem

    def ratios(self, reference: "Row | None") -> list[float]:
        """Its time by the reference's, trial by trial; none if one of them is not measured."""
        if reference is None or self.problem or reference.problem:
            return []
        return [own / other for own, other in zip(self.seconds, reference.seconds, strict=True)]


@dataclass
class Table:
    """Contenders with the same workload."""

    title: str
    reference: str  # the row that the others are compared with
    rows: list[Row]
    unit: str = "step"  # what a time is of
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def reference_row(self) -> Row | None:
        """The row that the others are compared with, if it was measured."""
        return next((row for row in self.rows if row.name == self.reference and row.is_measured), None)

    def to_dict(self) -> dict[str, Any]:
        """The table as results have it."""
        rows = [
            {
                "name": row.name,
                "about": row.about,
                "problem": row.problem or None,
                f"ms_per_{self.unit}": _rounded([1000 * seconds for seconds in row.seconds]),
                f"times_{self.reference}": _rounded(row.ratios(self.reference_row())),
                "chosen": row.chosen or None,
                "seconds": row.seconds,
                "losses": row.losses,
                "weights_sha256": row.weights_sha256,
                "peak_bytes": row.peak_bytes or None,
            }
            for row in self.rows
        ]
        about = {"title": self.title, "reference": self.reference, "settings": self.settings, "notes": self.notes}
        return about | {"rows": rows}

    def text(self) -> str:
        """The table for the terminal."""
        grid = Grid(box=None, pad_edge=False, title=self.title, title_justify="left", title_style="bold")
        grid.add_column("")
        for heading in (f"ms/{self.unit}", "(lowest to highest)", f"times {self.reference}", "(lowest to highest)"):
            grid.add_column(heading, justify="right")
        has_memory = any(row.peak_bytes for row in self.rows)
        grid.add_column("GPU memory" if has_memory else "", justify="right")
        grid.add_column("")
        reference = self.reference_row()
        for row in self.rows:
            if not row.is_measured:
                grid.add_row(row.name, "", "", "", "", "", row.problem)
                continue
            time = spread([1000 * seconds for seconds in row.seconds])
            ratio = spread(ratios) if (ratios := row.ratios(reference)) else None
            grid.add_row(
                row.name,
                f"{time.median:.4g}",
                f"({time.lowest:.4g} to {time.highest:.4g})",
                f"{ratio.median:.2f}x" if ratio else "",
                f"({ratio.lowest:.2f} to {ratio.highest:.2f})" if ratio and row is not reference else "",
                f"{row.peak_bytes / 2**30:.1f} GiB" if row.peak_bytes else "",
                row.chosen,
            )
        out = Console(width=160, highlight=False, markup=False)
        with out.capture() as captured:
            out.print(grid)
            for note in [*self.notes, *(["GPU memory is beside samples that are kept there"] if has_memory else [])]:
                out.print(f"  {note}", style="dim")
        return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _rounded(values: list[float]) -> dict[str, float] | None:
    return {name: round(value, 4) for name, value in spread(values)._asdict().items()} if values else None
