"""The help: groups of options with the few that matter first; and completion in the shell."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep.cli
from lockstep.bench.contenders import CONTENDERS, OURS
from lockstep.bench.workload import MODELS as BENCH_MODELS
from lockstep.cli.completion import TABLES
from lockstep.config import settings_in
from lockstep.core import names
from lockstep.core.settings import flag_of
from lockstep.data import DATASETS
from lockstep.models import MODELS
from lockstep.models.losses import LOSSES, MODEL
from lockstep.optim.optimizers import OPTIMIZERS
from lockstep.optim.torch_optimizers import OPTIMIZERS as MODULE_OPTIMIZERS
from lockstep.report.loggers import TENSORBOARD


def panels(text):
    """The titles of the panels, and the options in each."""
    found = {}
    for line in text.splitlines():
        if title := re.match(r"╭─ (.+?) ─+╮", line):
            found[title[1]] = []
        elif option := re.match(r"│ (--[\w-]+)", line):
            found[list(found)[-1]].append(option[1])
    return found


def test_options_are_in_groups_with_the_few_that_matter_first(lockstep):
    found = panels(lockstep("train", "--help").out)
    assert list(found) == [
        "Options",
        "Optimization (changes the weights)",
        "How ranks work",
        "What is recorded",
        "Checks and failures",
    ]
    assert found["Options"][:6] == ["--devices", "--batch-size", "--lr", "--epochs", "--model", "--data"]
    assert len(found["Options"]) <= 16
    assert {flag_of(each) for each in settings_in()} <= {option for options in found.values() for option in options}


def test_the_help_says_what_precisions_there_are(lockstep):
    words = lockstep("train", "--help").out
    assert all(precision in words for precision in ("fp32", "tf32", "bf16"))
    assert "tf32" in lockstep("bench", "--help").out


def test_the_help_and_the_completion_have_every_name_of_the_tables(lockstep):
    assert set(names.MODELS) == set(MODELS)
    assert set(names.DATASETS) == set(DATASETS)
    assert set(names.LOSSES) == {*LOSSES, MODEL}
    assert set(names.OPTIMIZERS) == set(OPTIMIZERS) == set(MODULE_OPTIMIZERS)
    assert set(names.LOGGERS) == {TENSORBOARD}
    assert set(TABLES["models"]) == set(BENCH_MODELS)
    assert {OURS, *TABLES["only"]} == set(CONTENDERS)
    words = re.findall(r"[\w-]+", lockstep("train", "--help").out)
    assert {*names.MODELS, *names.DATASETS, *names.LOSSES, *names.OPTIMIZERS} <= set(words)


def test_a_flag_shows_no_type_as_if_it_took_a_value(lockstep):
    for command in ([], ["train"], ["compare"], ["bench"], ["data"], ["report"], ["runs"]):
        answer = lockstep(*command, "--help").out
        assert "--help" in answer
        assert "<bool>" not in answer
        assert "BOOL" not in answer
    assert "<int>" in lockstep("train", "--help").out


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_of_the_help_breaks_inside_a_word(lockstep, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
    cells = re.findall(r"│(.*)│", lockstep("train", "--help").out)
    read = " ".join(cell[30:].strip() for cell in cells)
    for word in ("package.module:function", "cross_entropy", "fashion-mnist-mini", "inprocess"):
        assert word in " ".join(cells)
    assert "…" not in read


def test_without_a_command_the_help_is_shown_once(lockstep):
    assert lockstep().out.count("Usage: lockstep") == 1


BASH = """
source {file}
COMP_WORDS=({words}) COMP_CWORD={at}
_lockstep_completion lockstep
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def bash(tmp_path):
    """Installs the completion into an empty home, and asks bash what could follow some words."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed.")
    environment = {
        "HOME": str(tmp_path),
        "SHELL": "/bin/bash",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    command = [sys.executable, "-m", "lockstep", "--install-completion", "bash"]
    program = Path(sys.executable).parent / "lockstep"
    if program.exists():
        command[:3] = [str(program)]
    installed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    (file,) = [path for path in tmp_path.rglob("*.sh") if "lockstep" in path.name]
    assert str(file) in (tmp_path / ".bashrc").read_text()

    def ask(*words):
        script = BASH.format(file=file, words=" ".join(words), at=len(words) - 1)
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
        return done.stdout.split()

    return ask


def test_the_completion_installs_and_bash_knows_commands_options_and_values(bash):
    assert set(bash("lockstep", "tr")) == {"train"}
    assert "--batch-size" in bash("lockstep", "train", "--ba")
    assert bash("lockstep", "train", "--precision", "t") == ["tf32"]
    assert set(bash("lockstep", "train", "--engine", "")) == {"auto", "inprocess", "processes"}


VALUES = {
    ("train", "--model", "le"): ["lenet", "lenet-bn"],
    ("train", "--data", "fash"): ["fashion-mnist", "fashion-mnist-mini"],
    ("train", "--optimizer", "ad"): ["adam", "adamw"],
    ("train", "--loss", "m"): ["mse", "model"],
    ("train", "--logger", ""): ["tensorboard"],
    ("train", "--split", "net"): ["network"],
    ("train", "--data", "mine.n"): [],  # then shells offer files
    ("plan", "--model", "vi"): ["vit-b-16"],
    ("data", "fashion-mnist-"): ["fashion-mnist-mini"],
    ("compare", "--optimizer", "sgd,adamw,"): ["sgd,adamw,sgd", "sgd,adamw,adam", "sgd,adamw,adamw"],
    ("compare", "--exchange", "sharded,tr"): ["sharded,tree"],
    ("bench", "--models", "lenet,ml"): ["lenet,mlp"],
    ("bench", "--only", "ddp-c"): ["ddp-compiled"],
    ("bench", "--precision", "t"): ["tf32"],
}


@pytest.mark.parametrize("words", VALUES, ids=" ".join)
def test_values_of_options_are_completed_from_their_tables(words, monkeypatch, capsys):
    monkeypatch.setenv("_LOCKSTEP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"lockstep {' '.join(words)}")
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit):
        lockstep.cli.main([])
    assert capsys.readouterr().out.split() == VALUES[words]


def test_completing_a_value_imports_no_framework():
    code = "import sys, lockstep.cli; assert not {'torch', 'numpy', 'jax', 'rich', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_shell_that_asks_starts_no_command(monkeypatch, capsys):
    monkeypatch.setenv("_LOCKSTEP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "lockstep tra")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit) as ended:
        lockstep.cli.main([])
    assert not ended.value.code
    assert capsys.readouterr().out.split() == ["train"]
