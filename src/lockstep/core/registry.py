"""Choosing by name from a table, with an error that lists what there is."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from lockstep.core.errors import ConfigError

T = TypeVar("T")


def pick(table: Mapping[str, T], name: str, what: str, more: str = "") -> T:
    """The entry of `table` called `name`; the error lists what there is (and `more`) and the nearest name.

    >>> pick({"ring": 1, "tree": 2}, "tree", "exchange")
    2
    >>> pick({"ring": 1, "tree": 2}, "rign", "exchange")
    Traceback (most recent call last):
    lockstep.core.errors.ConfigError: There is no exchange called 'rign'. Did you mean 'ring'? There are: ring, tree.
    """
    if name in table:
        return table[name]
    hint = nearest(name.lower(), table)
    raise ConfigError(f"There is no {what} called {name!r}.{hint} There are: {', '.join(sorted(table))}{more}.")


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that was probably meant, as a question; nothing where none is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
