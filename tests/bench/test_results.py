"""Results are appended, one line for each run, with the commit that was measured."""

import json
import subprocess

import pytest

from lockstep.bench.results import append_result, current_commit, describe_run


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with one commit, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "test@example.com")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "a.jsonl").write_text("{}\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_a_run_is_appended_to_earlier_ones(tmp_path):
    path = tmp_path / "new" / "folder" / "a.jsonl"
    append_result(path, {"seconds": 1.5})
    append_result(path, {"seconds": float("nan"), "folder": tmp_path})
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"seconds": 1.5}, {"seconds": None, "folder": str(tmp_path)}]
    assert [file.name for file in path.parent.iterdir()] == ["a.jsonl"]


def test_a_result_names_its_commit_command_machine_and_versions(checkout):
    result = describe_run("python", "benchmarks/devices.py")
    assert list(result) == ["commit", "date", "command", "machine", "versions"]
    assert result["commit"] == git("rev-parse", "--short", "HEAD")
    assert result["command"] == "python benchmarks/devices.py"
    assert {"python", "lockstep", "torch", "numpy"} <= set(result["versions"])
    assert "surely-not-there" not in result["versions"]
    assert "cores" in result["machine"][-1]


def test_uncommitted_changes_are_marked_except_those_of_results(checkout):
    head = git("rev-parse", "--short", "HEAD")
    (checkout / "benchmarks" / "results" / "a.jsonl").write_text("{}\n{}\n")
    assert current_commit() == head
    (checkout / "code.py").write_text("2\n")
    assert current_commit() == f"{head}-dirty"


def test_outside_a_checkout_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert current_commit() == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))  # git is not installed
    assert current_commit() == "unknown"
