"""The tables as one plot: for each contender a bar for its median, a line for its range, and its ratio."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lockstep.bench.contenders import CONTENDERS
from lockstep.bench.tables import Table, spread

OWN, OTHER = "tab:blue", "0.7"


def draw_tables(tables: list[Table], title: str, path: Path) -> None:
    """Written to `path` as PNG; rows without times are left out."""
    shown = [(table, rows) for table in tables if (rows := [row for row in table.rows if row.is_measured])]
    heights = [1.2 + len(rows) for _, rows in shown]
    figure = Figure(figsize=(8.0, 0.8 + 0.3 * sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    all_axes: Any = figure.subplots(max(len(shown), 1), 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    for axes, (table, rows) in zip(all_axes, shown, strict=False):
        times = [spread([1000 * seconds for seconds in row.seconds]) for row in rows]
        others = [table.reference]
        if table.unit != "exchange":
            others = [name for name, contender in CONTENDERS.items() if not contender.is_own]
        axes.barh(
            range(len(rows)),
            [time.median for time in times],
            xerr=[[time.median - time.lowest for time in times], [time.highest - time.median for time in times]],
            color=[OTHER if row.name in others else OWN for row in rows],
            error_kw={"linewidth": 1, "capsize": 2},
        )
        for number, (row, time) in enumerate(zip(rows, times, strict=True)):
            if ratios := row.ratios(table.reference_row()):
                axes.text(time.highest, number, f"  {spread(ratios).median:.2f}x  ", va="center", fontsize="small")
        axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.tick_params(axis="x", labelsize="small")
        axes.set_xlim(left=0)
        axes.set_title(f"{table.title} (x: times {table.reference})", fontsize="small", loc="left")
        axes.set_xlabel(f"ms/{table.unit}", fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")
