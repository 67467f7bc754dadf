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
    """The rows without as many of the columns `less_needed`, in this order, as do not fit into `width`.

    >>> narrowed([("run", "data"), ("first", "fashion-mnist")], 10, ["data"])
    [('run',), ('first',)]
    """
    found = [tuple(row) for row in rows]
    for title in less_needed:
        line = sum(max(map(len, column)) + 2 for column in zip(*found, strict=True)) - 2
        if width is None or line <= width:
            break
        if title in found[0]:
            at = found[0].index(title)
            found = [(*row[:at], *row[at + 1 :]) for row in found]
    return found


def listed_devices(devices: Sequence[str]) -> str:
    """The names of devices; of many, the first and the last.

    >>> listed_devices(["cpu:0", "cpu:1"]), listed_devices([f"cpu:{i}" for i in range(16)])
    ('cpu:0, cpu:1', '16 devices (cpu:0 ... cpu:15)')
    """
    return ", ".join(devices) if len(devices) <= MANY else f"{len(devices)} devices ({devices[0]} ... {devices[-1]})"
