"""Lines on a terminal are broken between words; a pipe gets them as they are."""

import io

import pytest

from lockstep.cli.output import note, say
from lockstep.core.terminal import width_of, wrapped

SENTENCE = "A sentence that has many words, more than a narrow terminal has room for in one line of its own."


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")


def test_a_pipe_has_no_width_and_a_terminal_that_of_its_window(monkeypatch):
    assert width_of(io.StringIO()) is None
    assert width_of(Terminal()) == 40
    for wrong in ("", "0", "wide"):
        monkeypatch.setenv("COLUMNS", wrong)
        assert width_of(Terminal()) == 80, "a terminal that does not know its size"
    closed = Terminal()
    closed.close()
    closed.isatty = lambda: (_ for _ in ()).throw(ValueError("closed"))
    assert width_of(closed) is None


def test_words_stay_whole_and_lines_that_fit_stay_as_they_are():
    path = "/somewhere/" + "x" * 50
    found = wrapped(f"{SENTENCE}\n  a table   row\n{path}", 40).splitlines()
    assert found[-2:] == ["  a table   row", path]
    assert all(len(line) <= 40 for line in found[:-1])
    assert " ".join(" ".join(found[:-2]).split()) == SENTENCE


@pytest.mark.parametrize(("print_it", "stream"), [(say, "stdout"), (note, "stderr")])
def test_what_commands_print_is_wrapped_on_a_terminal_only(monkeypatch, print_it, stream):
    for out, number in ((Terminal(), 3), (io.StringIO(), 1)):
        monkeypatch.setattr(f"sys.{stream}", out)
        print_it(SENTENCE)
        assert out.getvalue().count("\n") == number
        assert " ".join(out.getvalue().split()) == SENTENCE


def test_an_error_is_wrapped_between_words(monkeypatch, tmp_path):
    from lockstep.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--out", "nowhere"])
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 40 for line in lines)
