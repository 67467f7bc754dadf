"""How results show themselves: a short table, in a notebook too."""

from collections.abc import Sequence
from html import escape


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
