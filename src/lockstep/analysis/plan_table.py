"""A plan for the terminal, a file or a pipe."""

import io
import textwrap

from lockstep.analysis.plan import Plan, PlanRow
from lockstep.core.random_state import random_state_kept
from lockstep.report.console import size

with random_state_kept():
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

MAX_ROWS = 32  # of the table on a terminal
WIDTH, COMPLETE = 100, 160  # columns of text; where nothing of it is wrapped
NARROW = 100  # columns: below, there is little room between those of the table
COMMAND = "  lockstep"  # a line that begins with it is to be copied, and is never wrapped


def as_text(plan: Plan, width: int = WIDTH, *, is_styled: bool = False, has_all: bool = False) -> str:
    """The table, what is recommended, and what there is to know about it; perhaps with all rows, or for a terminal."""
    rows = list(plan.rows) if has_all else shown(plan)
    out = Console(file=io.StringIO(), width=width, force_terminal=is_styled, highlight=False)
    if not is_styled:
        out.no_color = True
    out.print(Text(plan.title), soft_wrap=True)
    out.print()
    out.print(table(rows, plan.recommended, width))
    if left_out := len(plan.rows) - len(rows):
        out.print(f"{left_out} slower configurations are not shown (--json has all, and so has a pipe)", soft_wrap=True)
    out.print()
    for line in advice(plan, rows, width):
        out.print(Text(line), soft_wrap=True)
    text = out.file.getvalue() if isinstance(out.file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in text.splitlines())


def shown(plan: Plan) -> list[PlanRow]:
    """All rows, or where there are many: of each number of devices and shards the fastest, of the run's own S more."""
    if len(plan.rows) <= MAX_ROWS:
        return list(plan.rows)
    own = plan.recommended.configuration.num_shards
    best: dict[tuple[int, int], PlanRow] = {}
    for row in sorted(plan.rows, key=lambda row: (not row.fits, row.predicted_ms)):
        best.setdefault((row.configuration.num_devices, row.configuration.num_shards), row)
    keep = [
        row for row in plan.rows if row in best.values() or (row.configuration.num_shards == own and row.speedup > 1)
    ]
    if len(keep) > MAX_ROWS:
        keep = [row for row in keep if row.configuration.num_shards == own or row is plan.recommended]
    if len(keep) > MAX_ROWS:
        keep = [row for row in keep if row in best.values()]
    return keep


def table(rows: list[PlanRow], recommended: PlanRow, width: int = WIDTH) -> Table:
    """The rows in columns; an arrow marks the one that is recommended. A long split takes several lines."""
    is_checked = any(row.measured_ms is not None for row in rows)
    found = Table(box=None, pad_edge=False, padding=(0, 2 if width >= NARROW else 1, 0, 0), header_style="")
    found.add_column("")
    found.add_column("devices", justify="right", no_wrap=True)
    found.add_column("split", overflow="fold")
    for heading in ("shards", "ms a\nstep", "speed-up", "memory\na device"):
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_column("limited\nby", no_wrap=True)
    if is_checked:
        found.add_column("measured", justify="right", no_wrap=True)
        found.add_column("error", justify="right", no_wrap=True)
    for row in rows:
        is_best = row.configuration == recommended.configuration
        found.add_row(*cells(row, is_best, is_checked), style="bold" if is_best else "" if row.fits else "dim")
    return found


def cells(row: PlanRow, is_best: bool, is_checked: bool) -> list[str]:
    """What the table says about a configuration."""
    found = [
        "->" if is_best else "",
        str(row.configuration.num_devices),
        row.split.replace(",", ", "),
        f"{row.configuration.num_shards}{'' if row.is_same_run else '*'}",
        milliseconds(row.predicted_ms),
        f"{row.speedup:.2f}",
        size(row.memory_bytes),
        row.limited_by,
    ]
    if is_checked and row.measured_ms is not None and row.error is not None:
        found += [milliseconds(row.measured_ms), f"{100 * row.error:+.0f} %"]
    return found


def milliseconds(value: float) -> str:
    """Four digits, or all that a long step has.

    >>> milliseconds(35.4412), milliseconds(17941.2)
    ('35.44', '17,941')
    """
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def advice(plan: Plan, rows: list[PlanRow], width: int) -> list[str]:
    """The recommendation, with the line to copy."""
    best, lines = plan.recommended, list[str]()
    is_one = best.configuration.num_devices == 1
    said = "one device is best" if is_one else f"{best.configuration.num_devices} devices, split {best.split}"
    lines += [f"recommended: {said}, {milliseconds(best.predicted_ms)} ms a step", f"  {best.command}"]
    notes = [note for note in plan.notes if note != "one device is best"]
    if any(not row.is_same_run for row in rows):
        notes.append("* other weights: the number of shards, and slices, are part of the run.")
    for note in "\n".join(notes).splitlines():
        lines += [note] if note.startswith(COMMAND) else textwrap.wrap(note, width)
    return lines
