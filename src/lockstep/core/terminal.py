"""Text for a terminal, which would break long lines inside words: broken between them. A pipe gets it as it is."""

import os
import textwrap
from typing import Any

DEFAULT_WIDTH = 80


def width_of(stream: Any) -> int | None:
    """The columns of the terminal that a stream writes to; None where it is a file or a pipe."""
    try:
        if not stream.isatty():
            return None
    except (AttributeError, ValueError):  # it is closed
        return None
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):
        return DEFAULT_WIDTH


def wrapped(text: str, width: int | None) -> str:
    """The text with no line longer than `width`, but for words that are; lines that fit stay as they are.

    >>> print(wrapped("a sentence that is long", 12))
    a sentence
    that is long
    """
    if width is None:
        return text
    return "\n".join(
        line if len(line) <= width else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
