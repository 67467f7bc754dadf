"""How the code is kept: short files, few arguments, the field's words, one version, pages that are up to date."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "lockstep"
FILES = sorted(SOURCE.rglob("*.py"))
OLD_WORDS = (  # private words that the field has names for: see CONTRIBUTING.md
    r"whereabouts|way out|WayOut|departures|LastLeaf|PeersLost|sent home|sends everybody|stopwatch|recorded steps?|"
    r"RecordedSteps|Recorder|meeting place|find_late|nobody is in a hurry|code of its own|asking for kernels"
)


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # named tuples look their module up
    spec.loader.exec_module(module)
    return module


def test_few_files_are_at_the_root_and_none_is_long():
    assert len(list(SOURCE.glob("*.py"))) <= 6
    assert {str(file.relative_to(SOURCE)): n for file in FILES if (n := len(file.read_text().splitlines())) > 300} == {}


def test_no_function_takes_more_than_six_positional_arguments():
    found = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls", "ctx")]
                if len(names) > 6:
                    found.append(f"{file.relative_to(SOURCE)}:{node.lineno} {node.name}")
    assert not found


def test_every_module_says_what_it_holds():
    for file in FILES:
        assert ast.get_docstring(ast.parse(file.read_text())), file


@pytest.mark.parametrize("folder", ["src", "docs", "examples", "benchmarks"])
def test_words_that_were_replaced_do_not_come_back(folder):
    pages = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md"), ROOT / "README.md"]
    found = [
        f"{page.relative_to(ROOT)}: {match[0]}"
        for page in pages
        if (match := re.search(OLD_WORDS, page.read_text(), re.IGNORECASE))
    ]
    assert not found


def test_there_is_one_version():
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == lockstep.__version__
    assert "version" in re.search(r"^dynamic = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def test_the_api_reference_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "api_reference.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_deliberate_break_still_fits_the_code_and_is_documented():
    mutate, page = load_tool("mutate"), (ROOT / "docs" / "testing.md").read_text()
    for one in mutate.BREAKS:
        assert not mutate.is_stale(one), f"{one.what}: {one.file} has changed, update tools/mutate.py"
        assert f"| {one.what} |" in page, f"{one.what}: not in docs/testing.md"
        assert one.old != one.new


def test_every_test_that_the_page_about_tests_names_is_there():
    named = re.findall(r"`([\w/]+\.py)`: `(test_\w+)`", (ROOT / "docs" / "testing.md").read_text())
    assert named
    assert [name for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()] == []
