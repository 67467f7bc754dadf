"""`lockstep report` and `lockstep runs`: what a run left behind, shown; in a real Chromium, too."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lockstep.report.runlog import RunLog
from report.browser import Browser

MAX_BYTES = 2_000_000
SETTINGS = ("--batch-size", 8, "--epochs", 40, "--checkpoint-every", 5, "--trace", "--quiet")


def train(few, folder, *arguments):
    command = [sys.executable, "-m", "lockstep", "train", "--data", few, *SETTINGS, "--out", folder, *arguments]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def crashed(few, tmp_path_factory):
    """A run on three devices, traced, killed after its first checkpoints and resumed."""
    folder = tmp_path_factory.mktemp("runs") / "crashed"
    process = train(few, folder, "--devices", 3)
    began = time.monotonic()
    while not list(folder.glob("checkpoints/step-*")) and process.poll() is None:
        assert time.monotonic() < began + 60
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it was too fast to be killed"
    resumed = train(few, folder, "--devices", 3, "--resume")
    resumed.communicate()
    assert resumed.returncode == 0
    return folder


@pytest.fixture(scope="module")
def plain(few, tmp_path_factory, crashed):
    """The same run on one device, without a crash."""
    folder = crashed.parent / "plain"
    process = train(few, folder, "--devices", 1)
    process.communicate()
    assert process.returncode == 0
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def page_of(lockstep, *runs):
    answer = lockstep("report", *runs)
    assert answer.status == 0, answer.err
    path = answer.out.strip()
    with open(path, encoding="utf-8") as file:
        return path, file.read()


def test_the_report_of_a_crashed_run_has_all_that_its_files_say(lockstep, crashed):
    path, page = page_of(lockstep, crashed)
    assert path == str(crashed / "report.html")
    assert os.path.getsize(path) < MAX_BYTES
    result = json.loads((crashed / "result.json").read_text())
    for words in (
        result["weights_sha256"], f"{result['test_accuracy']:.4f}", "Training loss", "Test accuracy", "Learning rate",
        "Throughput", "One step, device by device", "0 · cpu:0", "2 · cpu:2", "Peak memory", "killed",
        "resumed", "To repeat it", "lockstep train --devices 3 --batch-size 8 --epochs 40",
        "version of the backend", "Checks and failures",
    ):  # fmt: skip
        assert words in page, words
    assert re.search(r"continuing after step \d+", page)
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|<script""", page), "it would load something"


def test_the_command_to_repeat_a_run_repeats_it(lockstep, plain, few, tmp_path):
    _, page = page_of(lockstep, plain)
    command = re.search(r"<pre>lockstep (train .*?)</pre>", page)[1].split()
    again = lockstep(*command, "--json", "--quiet")
    assert again.json["weights_sha256"] == json.loads((plain / "result.json").read_text())["weights_sha256"]


def test_two_runs_side_by_side_show_what_differs(lockstep, crashed, plain):
    path, page = page_of(lockstep, plain, crashed)
    assert path == str(crashed.parent / "report.html")
    assert "same weights, bit for bit" in page
    marked = re.findall(r'<tr class="differs"><th>([^<]+)</th>', page.partition('id="side-by-side"')[2])
    assert {"devices", "incidents", "devices at the end"} <= set(marked)
    assert "batch-size" not in marked
    assert "weights sha256" not in marked


@pytest.mark.parametrize("width", [1100, 360])
@pytest.mark.parametrize("dark", [False, True])
def test_chromium_shows_it_from_a_file_and_neither_asks_for_anything_nor_complains(
    lockstep, browser, crashed, plain, width, dark
):
    for runs in ([crashed], [plain, crashed]):
        path, _ = page_of(lockstep, *runs)
        browser.open(runs[0].parent / "report.html" if len(runs) > 1 else crashed / "report.html", width, dark=dark)
        assert browser.complaints() == []
        (asked,) = browser.requests()
        assert asked.startswith("file://")
        assert path in asked
        assert browser.evaluate("document.querySelectorAll('svg').length") >= 4
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, "it is wider than the screen"
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark


SIZES = """Math.min(...[...document.querySelectorAll('svg text, .rows span:not(:empty)')].map(
  text => parseFloat(getComputedStyle(text).fontSize) * (text.getScreenCTM ? text.getScreenCTM().a : 1)))"""
CUT = """[...document.querySelectorAll('.rows, .rows svg, .chart, .card')].filter(
  each => each.getBoundingClientRect().right > innerWidth || each.scrollWidth > each.clientWidth + 1).length"""
UNHINTED = """[...document.querySelectorAll('.scroll')].filter(
  each => each.scrollWidth > each.clientWidth && !getComputedStyle(each).backgroundImage.includes('gradient')).length"""


@pytest.mark.parametrize("width", [390, 360])
def test_on_a_phone_charts_fit_text_can_be_read_and_tables_show_that_there_is_more(lockstep, browser, crashed, width):
    page_of(lockstep, crashed)
    browser.open(crashed / "report.html", width)
    assert browser.evaluate("document.querySelectorAll('.rows').length") >= 2
    assert browser.evaluate(SIZES) >= 11
    assert browser.evaluate(CUT) == 0
    assert browser.evaluate(UNHINTED) == 0


def test_it_prints(lockstep, browser, crashed):
    page_of(lockstep, crashed)
    browser.open(crashed / "report.html", 1100, dark=True)
    dark, pdf = browser.screenshot(), browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert 10_000 < len(pdf) < MAX_BYTES
    assert len(dark) > 50_000, "the picture is nearly empty"


def test_names_of_runs_are_text_and_no_html(lockstep, few, tmp_path):
    name = "<script>alert(1)</script>"
    settings = ("--data", few, "--batch-size", 8, "--epochs", 1, "--quiet")
    assert lockstep("train", *settings, "--out", name.replace("/", ":")).status == 0
    _, page = page_of(lockstep, name.replace("/", ":"))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_runs_that_did_not_finish_and_damaged_files_are_shown(lockstep, crashed, tmp_path):
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_text((crashed / "config.json").read_text())
    assert "not finished" in page_of(lockstep, folder)[1]
    lines = (crashed / "metrics.jsonl").read_text().splitlines()[:20]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "step", "st', "[1]", '{"event": "epoch"}']))
    (folder / "trace.json").write_text('[{"ph": "X", "args": null}, 3, {"ph": "X", "ts": "x", "args": {"step": 1}}]')
    assert "Training loss" in page_of(lockstep, folder)[1]
    (folder / "trace.json").write_text("[{")
    answer = lockstep("report", folder)
    assert answer.status == 2
    assert "trace.json is damaged" in answer.err


@pytest.mark.parametrize(("folder", "sentence"), [("nowhere", "is not a run: it has no config.json")])
def test_what_is_no_run_is_refused(lockstep, folder, sentence):
    answer = lockstep("report", folder)
    assert answer.status == 2
    assert sentence in answer.err


def test_runs_are_listed_and_sorted(lockstep, crashed, plain, tmp_path):
    answer = lockstep("runs", crashed.parent)
    head, *lines = answer.out.splitlines()
    assert head.split()[:3] == ["run", "started", "status"]
    assert [line.split()[0] for line in lines] == [str(crashed), str(plain)]
    assert "finished" in lines[0]
    names = [row["run"] for row in lockstep("runs", crashed.parent, "--sort", "name", "--reverse", "--json").json]
    assert names == [str(plain), str(crashed)]
    (tmp_path / "empty").mkdir()
    assert lockstep("runs", "empty").out == "There are no runs in empty.\n"
    assert lockstep("runs").status == 2
    assert "order (--sort)" in lockstep("runs", crashed.parent, "--sort", "size").err


def test_a_run_that_is_under_way_is_told_from_one_that_was_killed(lockstep, crashed, tmp_path):
    folder = tmp_path / "all" / "one"
    shutil.copytree(crashed, folder)
    (folder / "result.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(line for line in lines if '"done"' not in line) + "\n")

    def status():
        (found,) = lockstep("runs", "all", "--json").json
        return found["status"]

    assert status() == "killed"
    log = RunLog(folder, is_resumed=True)
    log.claim()
    assert status() == "running"
    log.close()
    assert status() == "killed"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_on_a_terminal_the_list_of_runs_fits_into_its_width(lockstep, crashed, plain, monkeypatch, width):
    whole = lockstep("runs", crashed.parent).out
    monkeypatch.chdir(crashed.parent.parent)
    monkeypatch.setattr(sys.modules["lockstep.cli.runs"], "width_of", lambda stream: width)
    answer = lockstep("runs", crashed.parent.name)
    assert max(map(len, answer.out.splitlines())) <= width < max(map(len, whole.splitlines()))
    assert answer.out.split()[0] == "run"
    assert "finished" in answer.out


def test_the_help_says_what_runs_prints_as_json(lockstep):
    assert "one JSON array" in " ".join(lockstep("runs", "--help").out.replace("│", " ").split())
