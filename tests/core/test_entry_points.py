"""Objects named on the command line, and what a run's record calls what has no name."""

import sys

import pytest

from lockstep.core.errors import ConfigError
from lockstep.core.entry_points import describe, is_entry_point, load_entry_point
from lockstep.core.source_lines import source_line_of


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["lenet", "a.npz", "C:\\data", "pkg:", ":fn", "pkg:fn()", "os;os:x", "a b:c", "../x:y", ""]
)
def test_what_is_no_place(name):
    assert not is_entry_point(name)


def test_a_file_in_the_current_folder_is_found(here):
    (here / "nets_here.py").write_text("class Box:\n    def make():\n        return 7\n")
    assert load_entry_point("nets_here:Box.make", "model")() == 7


def test_what_cannot_be_loaded_is_said_in_a_sentence(here):
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


def test_names_of_what_was_given():
    class Local:
        pass

    assert describe(pytest.raises) == "_pytest.raises:raises"
    assert describe(Local) == "a function given in Python"
    assert describe(Local()) == "a Local given in Python"


def test_a_source_line_is_one_of_a_file():
    """A thread that imports something is in code that has no file."""
    names = {"frame": sys._getframe}
    exec(compile("found = frame()", "<frozen importlib._bootstrap>", "exec"), names)
    assert source_line_of(names["found"]).startswith(f"{__file__}:")
    assert source_line_of(None) == ""
