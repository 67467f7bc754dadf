"""Files: written whole or not at all. Not trusted: regular ones are read, as much as expected, and shown with care."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

PART = ".part-"  # a file's name begins with it while it is written


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file; an OSError for links, pipes and devices, and for files that are too large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed") from problem
        raise
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, and at most {max_bytes:,} are expected")
        return file.read(found.st_size)


def can_be_path(text: str) -> bool:
    """Whether a file could have this name: there are characters that the system takes in none.

    >>> can_be_path("runs/mine"), can_be_path("a\\0b"), can_be_path("\\ud800")
    (True, False, False)
    """
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def printable(text: str) -> str:
    """Without characters that a terminal would act on, like escapes; line breaks stay.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def what_to_do(problem: OSError) -> str:
    """What helps against an error of writing."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space"
    if problem.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return "The folder was removed or renamed: put it back"
    if problem.errno in (errno.EISDIR, errno.ENOTEMPTY, errno.ESPIPE):
        return f"Remove what is in the place of a file: {problem.filename2 or problem.filename}"
    return "Look for what fails on that disk" if problem.errno == errno.EIO else "Make it writable"


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file by `write(temporary path)`: it is at `path` complete, or not at all."""
    temporary = path.with_name(f"{PART}{path.name}")
    try:
        temporary.unlink(missing_ok=True)  # of a run that was killed, or a link to somewhere else
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or the name may be lost with the power
        finally:
            os.close(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
