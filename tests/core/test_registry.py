"""Choosing by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import ConfigError
from lockstep.core.registry import pick

TABLE = {"tree": 1, "ring": 2, "gather": None}


@pytest.mark.parametrize("name", TABLE)
def test_a_name_gives_its_entry(name):
    assert pick(TABLE, name, "exchange") is TABLE[name]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rign", " Did you mean 'ring'?"),
        ("gathers", " Did you mean 'gather'?"),
        ("Tree", " Did you mean 'tree'?"),
        ("butterfly", ""),
        ("", ""),
    ],
)
def test_another_name_is_refused_with_the_nearest_and_all_names(name, hint):
    with pytest.raises(ConfigError) as refused:
        pick(TABLE, name, "exchange")
    assert str(refused.value) == f"There is no exchange called {name!r}.{hint} There are: gather, ring, tree."


@given(st.text())
def test_any_other_name_is_refused(name):
    if name not in TABLE:
        with pytest.raises(ConfigError, match="There is no exchange called"):
            pick(TABLE, name, "exchange")
