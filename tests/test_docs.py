"""The code in the documentation is run, top to bottom, as a reader would; links inside it lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_python_on_this_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{name(page)}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=name)
def test_the_commands_on_this_page_run_as_written_on_the_small_data_set(page, lockstep):
    """Lines that start with `lockstep` are run; the full data set and ten epochs are replaced to save time."""
    commands = [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("lockstep ")]
    for line in commands:
        arguments = line.partition("#")[0].split()[1:]
        if arguments[0] in ("train", "compare"):
            if "--data" not in arguments:
                arguments += ["--data", "fashion-mnist-mini"]
            if "--epochs" in arguments:
                at = arguments.index("--epochs")
                arguments[at : at + 2] = []
            arguments += ["--epochs", "1"]
        answer = lockstep(*arguments)
        assert answer.status == 0, (line, answer.err)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_pages_exist():
    assert len(PAGES) > 5
