"""The tables as one plot: for each contender a bar, how many times our own time it takes, trial by trial.

One kind of number only: the ratio of interleaved trials. The ratio of two medians may be another, and a label with one
beside a bar with the other would contradict it. Where our own time is missing, the bars are milliseconds.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lockstep.bench.contenders import CONTENDERS
from lockstep.bench.tables import Row, Spread, Table, spread

OWN, OTHER = "tab:blue", "0.7"
HOW_TO_READ = "Lower is better. Bars: medians of the trials; whiskers: lowest and highest trial."


def draw_tables(tables: list[Table], title: str, path: Path) -> None:
    """Written to `path` as PNG; rows without times are left out."""
    shown = [(table, rows) for table in tables if (rows := [row for row in table.rows if row.is_measured])]
    heights = [1.5 + len(rows) for _, rows in shown]
    figure = Figure(figsize=(8.0, 1.1 + 0.3 * sum(heights)), layout="constrained")
    figure.suptitle(f"{title}\n{HOW_TO_READ}", fontsize="small")
    all_axes: Any = figure.subplots(max(len(shown), 1), 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    for axes, (table, rows) in zip(all_axes, shown, strict=False):
        _draw(axes, table, rows)
    figure.savefig(path, dpi=150, format="png")


def bars_of(table: Table, rows: list[Row]) -> tuple[list[Spread], str]:
    """What the bars show, and in which unit: times the reference, or milliseconds where that is missing."""
    reference = table.reference_row()
    if reference is None:
        return [spread([1000 * seconds for seconds in row.seconds]) for row in rows], f"ms/{table.unit}"
    article = "an" if table.unit[0] in "aeiou" else "a"
    return [spread(row.ratios(reference)) for row in rows], f"time of {article} {table.unit} / {table.reference}'s"


def _draw(axes: Any, table: Table, rows: list[Row]) -> None:
    bars, unit = bars_of(table, rows)
    others = [table.reference]
    if table.unit != "exchange":
        others = [name for name, contender in CONTENDERS.items() if not contender.is_own]
    axes.barh(
        range(len(rows)),
        [bar.median for bar in bars],
        xerr=[[bar.median - bar.lowest for bar in bars], [bar.highest - bar.median for bar in bars]],
        color=[OTHER if row.name in others else OWN for row in rows],
        error_kw={"linewidth": 1, "capsize": 2},
    )
    sign = "x" if table.reference_row() else " ms"
    for number, bar in enumerate(bars):
        axes.text(bar.highest, number, f"  {bar.median:.2f}{sign}  ", va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize="small")
    axes.set_xlim(0, 1.15 * max(bar.highest for bar in bars))
    reference, trials = table.reference_row(), max(len(row.seconds) for row in rows)
    own = f"; {table.reference}: {1000 * spread(reference.seconds).median:.4g} ms" if reference else ""
    axes.set_title(f"{table.title} ({trials} trial{'s' * (trials > 1)}{own})", fontsize="small", loc="left")
    axes.set_xlabel(unit, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
