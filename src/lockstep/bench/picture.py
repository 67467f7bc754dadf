"""The tables as one picture: a bar for each contender's median, a line for its spread, its ratio beside it."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lockstep.bench.contenders import CONTENDERS
from lockstep.bench.tables import Table, spread

OWN, OTHER = "tab:blue", "0.7"


def draw_tables(tables: list[Table], title: str, path: Path) -> None:
    """Written to `path` as PNG; rows without numbers are left out."""
    shown = [table for table in tables if any(row.seconds and not row.problem for row in table.rows)]
    heights = [1.2 + sum(bool(row.seconds) for row in table.rows) for table in shown]
    figure = Figure(figsize=(8.0, 0.8 + 0.3 * sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    all_axes: Any = figure.subplots(max(len(shown), 1), 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    for axes, table in zip(all_axes, shown, strict=False):
        rows = [row for row in table.rows if row.seconds and not row.problem]
        reference = table.reference_row()
        times = [spread([1000 * seconds for seconds in row.seconds]) for row in rows]
        reach = [[t.median - t.lowest for t in times], [t.highest - t.median for t in times]]
        others = (
            [table.reference]
            if table.what == "exchange"
            else [name for name, who in CONTENDERS.items() if not who.is_own]
        )
        axes.barh(
            range(len(rows)),
            [time.median for time in times],
            xerr=reach,
            color=[OTHER if row.name in others else OWN for row in rows],
            error_kw={"linewidth": 1, "capsize": 2},
        )
        for place, (row, time) in enumerate(zip(rows, times, strict=True)):
            ratios = row.ratios(reference)
            said = f"  {spread(ratios).median:.2f}x" if ratios else ""
            axes.text(time.highest, place, f"{said}  ", va="center", fontsize="small")
        axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.tick_params(axis="x", labelsize="small")
        axes.set_xlim(left=0)
        axes.set_title(f"{table.title} (x: times {table.reference})", fontsize="small", loc="left")
        axes.set_xlabel(f"ms/{table.what}", fontsize="small")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150, format="png")
