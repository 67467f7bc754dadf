"""A run on the terminal: plain lines in a log, a bar on a terminal."""

import dataclasses
import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole

from lockstep.report import console as console_module
from lockstep.report.console import Console, FetchProgress, fetch_progress
from lockstep.report.events import EpochDone, Incident, RunDone, StepDone, Traced
from lockstep.report.waterfall_text import waterfall_lines

ERASE_LINE, HIDE_CURSOR, SHOW_CURSOR = "\x1b[2K", "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """The variables that rich reads, whatever this machine has set."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def shown(*events):
    stream = io.StringIO()
    with Console(stream) as console:
        for event in events:
            console.show(event)
    return stream.getvalue()


def shown_after(started, *events):
    """The lines after those that a run starts with."""
    return shown(started, *events).removeprefix(shown(started)).splitlines()


SPLITS = [
    ({}, "lr 0.2, exchange"),
    ({"split": "data=2"}, "lr 0.2, exchange"),
    ({"split": "network"}, "lr 0.2, split network, 1f1b, exchange"),
    ({"split": "data=2,layers=2", "num_slices": 8}, "lr 0.2, split data=2,layers=2, 8 slices, exchange"),
    ({"update": "sharded"}, "lr 0.2, update sharded, exchange"),
]


@pytest.mark.parametrize(("settings", "words"), SPLITS, ids=str)
def test_a_run_says_what_devices_share(make_started, settings, words):
    assert words in shown(make_started(**settings))


def test_a_run_ends_with_the_memory_of_each_device(make_started, make_result):
    def line(*held):
        memory = [{"parameters": each, "gradient": each, "optimizer": 0} for each in held]
        (found,) = shown_after(make_started(), RunDone(make_result(device_memory=memory))) or [""]
        return found

    assert line(1000, 6_300_000) == "parameters, gradients and optimizer state: cpu:0 2.0 kB, cpu:1 13 MB"
    assert line(10**9, 10**9) == "parameters, gradients and optimizer state: 2.0 GB on every device"
    assert line(1000) == "", "one device: there is nothing to share"


def test_a_run_starts_with_its_model_data_and_settings(make_started):
    head = shown(make_started())
    for what in (
        "lenet (63,070 parameters)",
        "on fashion-mnist-mini",
        "2,000",
        "500",
        "batch 256",
        "8 shards",
        "lr 0.2",
        "sharded",
        "torch 2.13.0 on 2 logical CPU devices",
        "[cpu:0, cpu:1]",
    ):
        assert what in head
    assert head.endswith("\n")
    assert "\x1b" not in head


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "batch 256 in 8 shards, lr 0.2, exchange sharded, "),
        (
            {
                "optimizer": "adamw",
                "learning_rate": 1e-3,
                "weight_decay": 0.01,
                "warmup": 1500000,
                "schedule": "cosine",
            },
            "8 shards, adamw, lr 0.001, weight decay 0.01, warm-up 1500000, cosine, exchange sharded, ",
        ),
        (
            {"momentum": 0.9, "clip_norm": 1.0, "batch_norm": "sync", "precision": "bf16"},
            "8 shards, lr 0.2, momentum 0.9, clip norm 1, batch norm sync, bf16, exchange sharded, ",
        ),
        ({"optimizer": "mine:adam", "learning_rate": None}, "8 shards, mine:adam, exchange sharded, "),
    ],
)
def test_settings_of_the_optimization_are_shown_where_they_are_not_the_default(make_started, settings, line):
    assert line in shown(make_started(**settings))


def test_a_run_in_a_log_is_a_line_for_each_epoch(make_started, make_result):
    result = make_result()
    assert shown_after(make_started(), StepDone(1, 1, 256), *result.history, RunDone(result)) == [
        "epoch 1/2  loss 1.5000  test acc 0.7000  12.0 s",
        "epoch 2/2  loss 0.5000  test acc 0.8437  12.7 s",
    ]


def test_a_recorded_run_ends_with_the_name_of_its_folder(make_started, make_result, tmp_path):
    (line,) = shown_after(make_started(), RunDone(make_result(run=tmp_path / "run")))
    assert f"recorded in {tmp_path / 'run'} " in line


def test_epoch_numbers_are_aligned(make_started):
    lines = shown_after(make_started(num_epochs=10), EpochDone(9, 1.0, 1.0, 0.5), EpochDone(10, 1.0, 1.0, 0.5))
    assert [line[:13] for line in lines] == ["epoch  9/10  ", "epoch 10/10  "]


def test_a_line_is_neither_wrapped_nor_read_as_markup(make_started, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    path = "/some/[bold]where[/bold]/" + "x" * 200 + ".npz"
    wide = shown(make_started()).replace("fashion-mnist-mini", path)
    assert shown(make_started(data=path)) == wide


def test_a_name_between_colons_is_no_emoji(make_started):
    assert "my:cat:pictures.npz" in shown(make_started(data="my:cat:pictures.npz"))


@pytest.mark.parametrize(("loss", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (1e30, "1e+30")])
def test_any_loss_is_shown(make_started, loss, text):
    (line,) = shown_after(make_started(learning_rate=30.0), EpochDone(1, 1.0, loss, 0.1))
    assert line == f"epoch 1/2  loss {text}  test acc 0.1000  1.0 s"


@pytest.mark.parametrize("num_epochs", [0, 1])
def test_a_run_that_stops_shows_nothing_more_because_the_error_does(make_started, make_stopped, num_epochs):
    stopped = make_stopped(num_epochs)
    assert len(shown_after(make_started(), *stopped.history, stopped)) == num_epochs


def test_an_exchange_that_does_not_keep_the_bits_is_noted(make_started):
    sentence = "The exchange ring adds in an order of its own: the bits depend on the devices."
    assert shown(make_started(keeps_bits=False, exchange="ring")).splitlines()[-1] == sentence
    assert "bits" not in shown(make_started())


def test_a_log_gets_a_line_every_ten_seconds_within_an_epoch(make_started, clock):
    stream = io.StringIO()
    with Console(stream) as console:
        console.show(make_started())
        head = stream.getvalue()
        for step, seconds in enumerate([4.0, 4.0, 4.0, 9.0, 2.0], 1):
            clock[0] += seconds
            console.show(StepDone(1, step, 256))
    assert stream.getvalue().removeprefix(head).splitlines() == [
        "epoch 1/2: step 3, 64 samples/s, about 52 s left",
        "epoch 1/2: step 5, 56 samples/s, about 51 s left",
    ]


def test_the_speed_is_that_of_the_current_epoch(make_started, clock):
    stream = io.StringIO()
    with Console(stream) as console:
        console.show(make_started())
        clock[0] += 1000.0
        console.show(EpochDone(1, 1000.0, 1.0, 0.5))
        clock[0] += 10.0
        console.show(StepDone(2, 9, 250))
    assert ": step 9, 25 samples/s," in stream.getvalue()


# --- on a terminal


def test_a_run_on_a_terminal_has_a_bar_which_is_removed_at_the_end(make_started, make_result):
    stream, result = Terminal(), make_result()
    with Console(stream) as console:
        console.show(make_started())
        console.show(StepDone(1, 4, 256))
        console.show(result.history[0])
        during = stream.getvalue()
        console.show(RunDone(result))
    assert " ".join(during.split()).startswith(" ".join(shown(make_started()).split()))
    assert "epoch 1/2" in during
    assert "  0%        0 samples/s" in during
    assert HIDE_CURSOR in during
    assert SHOW_CURSOR not in during
    assert "epoch 1/2  loss 1.5000  test acc 0.7000  12.0 s\n" in during
    end = stream.getvalue()[len(during) :]
    assert " 25%" in end
    assert SHOW_CURSOR in end
    assert end.endswith(ERASE_LINE)


def test_the_bar_is_removed_after_an_error(make_started):
    def fails(console):
        console.show(make_started())
        raise ZeroDivisionError

    stream = Terminal()
    with pytest.raises(ZeroDivisionError), Console(stream) as console:
        fails(console)
    assert SHOW_CURSOR in stream.getvalue()
    assert stream.getvalue().endswith(ERASE_LINE)


def test_the_bar_is_removed_when_a_run_stops(make_started, make_stopped):
    stream = Terminal()
    with Console(stream) as console:
        console.show(make_started())
        during = stream.getvalue()
        console.show(make_stopped(0))
        end = stream.getvalue()[len(during) :]
    assert SHOW_CURSOR not in during
    assert SHOW_CURSOR in end
    assert end.endswith(ERASE_LINE)
    assert "NaN or infinite" not in stream.getvalue()


@pytest.mark.parametrize("make_stream", [io.StringIO, Terminal])
def test_a_run_that_does_not_start_shows_nothing(make_stream):
    stream = make_stream()
    with Console(stream):
        pass
    assert stream.getvalue() == ""


def test_a_note_is_a_line():
    stream = io.StringIO()
    with Console(stream) as console:
        console.note("A sentence.")
    assert stream.getvalue() == "A sentence.\n"


def test_without_a_stream_it_is_standard_error(capsys):
    with Console() as console:
        console.note("A sentence.")
    assert capsys.readouterr() == ("", "A sentence.\n")


# --- downloads


def test_a_download_in_a_log_is_a_line_for_each_file(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with fetch_progress() as progress:
        for what in ("one.gz", "two.gz"):
            for num_bytes in (10, 20, 30):
                progress(what, num_bytes, 30)
    assert sys.stderr.getvalue() == "fetching one.gz\nfetching two.gz\n"


def test_without_a_download_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with fetch_progress():
        pass
    assert sys.stderr.getvalue() == ""


def test_a_download_on_a_terminal_is_a_bar_which_is_removed_at_the_end(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with fetch_progress() as progress:
        progress("one.gz", 10, 40)
        progress("Debian's package", 0, 0)
    assert "fetching one.gz" in terminal.getvalue()
    assert " 25%" in terminal.getvalue()
    assert SHOW_CURSOR in terminal.getvalue()
    assert terminal.getvalue().endswith(ERASE_LINE)


def test_a_download_of_unknown_size_is_shown_too():
    stream = io.StringIO()
    progress = FetchProgress(RichConsole(file=stream))
    progress("Debian's package", 0, 0)
    progress("Debian's package", 1000, 0)
    (task,) = progress.bar.tasks
    assert (task.completed, task.total) == (1000, None)
    assert stream.getvalue() == "fetching Debian's package\n"


def test_a_run_that_continues_with_other_workers_shows_only_what_happened(make_started):
    notes = ["rank 2 (cpu:2) was killed by SIGKILL", "continuing after step 5 on [cpu:0, cpu:1]"]
    started = dataclasses.replace(make_started(), step=5, num_restarts=1, notes=notes)
    assert shown(make_started(), started).removeprefix(shown(make_started())).splitlines() == notes
    assert shown(started).splitlines() == notes, "in another process: the first one has shown the rest"
    before_the_first_step = shown(dataclasses.replace(started, step=0))
    assert "lenet (63,070 parameters)" in before_the_first_step
    assert all(line in before_the_first_step for line in notes)


def test_the_bar_of_a_process_that_has_ended_is_erased(make_started):
    terminal = Terminal()
    with Console(terminal) as console:
        console.show(dataclasses.replace(make_started(), step=5, num_restarts=1, notes=["gone"]))
    assert terminal.getvalue().startswith(f"\r{ERASE_LINE}gone")


def test_an_incident_is_a_line(make_started):
    assert shown_after(make_started(), Incident("healed", "restored from rank 0")) == ["restored from rank 0"]


@pytest.mark.parametrize("width", [40, 60])
def test_on_a_terminal_a_long_line_is_broken_between_words(make_started, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    stream, path = Terminal(), "/somewhere/" + "x" * 70 + ".npz"
    with Console(stream) as console:
        for note in (*shown(make_started()).splitlines(), f"recorded in {path} (all of it)"):
            console.note(note)
    lines = stream.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines if path not in line)
    assert path in stream.getvalue()
    words = " ".join(shown(make_started()).split())
    assert " ".join(stream.getvalue().split()).startswith(words)


def test_the_loss_is_in_the_bar_and_in_the_lines_of_a_log(make_started, clock):
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with Console(stream) as console:
            console.show(make_started())
            clock[0] += 11.0
            console.show(StepDone(1, 4, 256, loss=1.23456))
            console.show(EpochDone(1, 1.0, 1.0, 0.5))
    assert "loss 1.2346" in terminal.getvalue()
    assert "epoch 1/2: step 4, loss 1.2346, 23 samples/s" in log.getvalue()


def test_the_bars_of_a_trace_fit_into_the_terminal(make_started, monkeypatch):
    explanation = {
        "step_ms": 10.0, "perfect_ms": 4.0, "parts": {"waiting for the slower rank": 6.0}, "rest_ms": -0.001,
        "num_devices": 2, "num_steps": 5,
    }  # fmt: skip
    lines = [*waterfall_lines(explanation), "what to change", "trace.json opens in Perfetto"]
    monkeypatch.setenv("COLUMNS", "64")
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with Console(stream) as console:
            console.show(Traced([], "said", lines, explanation))
    assert max(map(len, terminal.getvalue().splitlines())) <= 64
    assert len(terminal.getvalue().splitlines()) == len(lines)
    assert log.getvalue().splitlines() == lines, "a log has the bars as they are"
