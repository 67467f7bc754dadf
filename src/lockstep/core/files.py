"""Files that are not trusted: regular ones are read, as much as expected; and their text is not shown as it is."""

import errno
import os
import stat
from pathlib import Path


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
