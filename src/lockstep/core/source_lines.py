"""The user's own lines of code: in a traceback, and where a thread is now."""

import sysconfig
import traceback
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1])
NOT_THE_USERS = (sysconfig.get_path("stdlib"), PACKAGE, "<")


def at(source_line: str) -> str:
    """A line as the end of a sentence; nothing where it is not known.

    >>> f"It failed{at('net.py:7')}"
    'It failed (at net.py:7)'
    """
    return f" (at {source_line})" if source_line else ""


def user_source_line(error: BaseException) -> str:
    """`file:line` of the innermost frame of a traceback that is the user's own code, or nothing."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_users(frame.f_code.co_filename):
            where = f"{frame.f_code.co_filename}:{line}"
    return where


def source_line_of(frame: FrameType | None) -> str:
    """`file:line` that a thread is at: in the user's code that we called, where there is some, else the innermost."""
    while frame is not None and frame.f_code.co_filename.startswith("<"):  # <frozen importlib>: there is no such file
        frame = frame.f_back
    innermost = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost


def user_traceback(error: BaseException) -> str:
    """The part of an error's traceback that begins in the user's own code; nothing where there is none."""
    trace = error.__traceback__
    while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    shown = traceback.format_exception(type(error), error, trace, chain=False) if trace is not None else []
    return "".join(shown).rstrip()


def _is_users(file: str) -> bool:
    return not file.startswith(NOT_THE_USERS) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
