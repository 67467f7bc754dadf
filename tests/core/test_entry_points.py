"""Entry points named on the command line, and how a run's record describes objects without one."""

import sys

import pytest

from lockstep.core.entry_points import describe, is_entry_point, load_entry_point
from lockstep.core.errors import ConfigError
from lockstep.core.source_lines import source_line_of


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["lenet", "a.npz", "C:\\data", "pkg:", ":fn", "pkg:fn()", "os;os:x", "a b:c", "../x:y", ""]
)
def test_what_is_no_entry_point(name):
    assert not is_entry_point(name)


def test_a_file_in_the_current_folder_is_found(here):
    (here / "nets_here.py").write_text("class Box:\n    def make():\n        return 7\n")
    assert load_entry_point("nets_here:Box.make", "model")() == 7


def test_an_entry_point_that_cannot_be_loaded_is_refused_with_the_reason(here):
    (here / "breaks_here.py").write_text("raise KeyError('x')")
    (here / "needs_here.py").write_text("import not_installed_anywhere")
    (here / "empty_here.py").write_text("def thing(): ...")
    for name, sentence in {
        "nowhere_at_all:f": "The model nowhere_at_all:f cannot be loaded: there is no module nowhere_at_all, neither",
        "breaks_here:f": "The model breaks_here:f cannot be loaded: importing breaks_here fails with KeyError: 'x'.",
        "needs_here:f": "The model needs_here:f cannot be loaded: needs_here needs not_installed_anywhere, which is",
        "empty_here:f": "empty_here has no f for the model. It has: thing.",
    }.items():
        with pytest.raises(ConfigError) as refused:
            load_entry_point(name, "model")
        assert str(refused.value).startswith(sentence)


def test_user_objects_are_described():
    class Local:
        pass

    assert describe(pytest.raises) == "_pytest.raises:raises"

    def own():
        pass

    own.__module__ = "__main__"
    assert describe(Local) == describe(own) == "a function given in Python"
    own.__qualname__ = "own"
    assert describe(own) == "own given in Python"
    own.__module__ = None
    assert describe(own) == "own given in Python"
    assert describe(Local()) == "a Local given in Python"


def test_the_source_line_of_a_thread_that_imports_is_in_a_file():
    """The innermost frames of an import have no file."""
    names = {"frame": sys._getframe}
    exec(compile("found = frame()", "<frozen importlib._bootstrap>", "exec"), names)
    assert source_line_of(names["found"]).startswith(f"{__file__}:")
    assert source_line_of(None) == ""
