"""How results show themselves: a short table, in a notebook too."""

from collections.abc import Sequence
from html import escape

MANY = 4  # devices that are listed by name


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, the first row as headings.

    >>> print(text_table([("epoch", "loss"), ("1", "0.5")]))
    epoch  loss
        1   0.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The same in HTML."""
    head, *body = rows
    headings = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    lines = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{headings}</tr></thead><tbody>{lines}</tbody></table>"


def narrowed(rows: Sequence[Sequence[str]], width: int | None, less_needed: Sequence[str]) -> list[tuple[str, ...]]:
    """The rows with as many of the columns `less_needed` as fit into `width`; the first of them are left out first.

    >>> narrowed([("run", "data", "k"), ("first", "fashion-mnist", "2")], 10, ["data", "k"])
    [('run', 'k'), ('first', '2')]
    """
    columns = {column[0]: max(map(len, column)) + 2 for column in zip(*rows, strict=True)}
    kept = {title for title in columns if width is None or title not in less_needed}
    for title in reversed(less_needed):
        if title in columns and width is not None and sum(columns[each] for each in {*kept, title}) - 2 <= width:
            kept.add(title)
    return [tuple(cell for cell, title in zip(row, rows[0], strict=True) if title in kept) for row in rows]


def device_names(devices: Sequence[str]) -> str:
    """The names of devices; of many, the first and the last.

    >>> device_names(["cpu:0", "cpu:1"]), device_names([f"cpu:{i}" for i in range(16)])
    ('cpu:0, cpu:1', 'cpu:0 ... cpu:15')
    """
    return ", ".join(devices) if len(devices) <= MANY else f"{devices[0]} ... {devices[-1]}"


def listed_devices(devices: Sequence[str]) -> str:
    """The names of devices; of many, their number too."""
    names = device_names(devices)
    return names if len(devices) <= MANY else f"{len(devices)} devices ({names})"


def short(value: float) -> str:
    """A loss, or another number of a run.

    >>> short(2.30258), short(-1.58e21)
    ('2.3026', '-1.58e+21')
    """
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
