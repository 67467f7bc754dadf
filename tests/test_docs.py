"""The code in the documentation is run, top to bottom, as a reader would; links inside it lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(page for names in ("*.md", "docs/**/*.md", "examples/*.md") for page in ROOT.glob(names))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_python_on_this_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks(page, "python"), start=1):
        try:
            exec(compile(block, f"{name(page)}, block {number}", "exec"), namespace)
        except Exception as problem:
            pytest.fail(f"{name(page)}, block {number}: {type(problem).__name__}: {problem}")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=name)
def test_the_commands_on_this_page_run_as_written_on_the_small_data_set(page, lockstep, tmp_path):
    """Lines that start with `lockstep` are run; the full dataset, large models and ten epochs are replaced."""
    for file, content in re.findall(r"^```python (\w+\.py)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        (tmp_path / file).write_text(content)  # the page's own file, which its commands name
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
            arguments = ["lenet-bn" if argument == "resnet18" else argument for argument in arguments]
        answer = lockstep(*arguments)
        assert answer.status == 0, (line, answer.err)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_every_function_that_the_tour_names_is_there():
    named = re.findall(r"`([\w/]+)\.py: ([\w.]+)`", (ROOT / "docs" / "tour.md").read_text())
    assert len(named) > 20
    for module, function in named:
        assert_exists(module, function)


def test_every_function_of_the_table_where_x_happens_is_there():
    page = (ROOT / "docs" / "tour.md").read_text()
    named = re.findall(r"^\| [^|]+ \| `([\w/]+)\.py` \| `([\w.]+)` \|$", page, re.MULTILINE)
    assert len(named) > 10
    for module, function in named:
        assert_exists(module, function)


def test_the_readme_is_short_and_every_page_is_in_the_index():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
    assert "Dive into Deep" in (ROOT / "README.md").read_text()


def test_every_example_is_in_the_index():
    index = (ROOT / "examples" / "README.md").read_text()
    for program in (ROOT / "examples").glob("*.py"):
        assert f"({program.name})" in index, program.name


def test_the_lines_of_every_backend_are_as_many_as_the_page_says():
    page = (ROOT / "docs" / "frameworks.md").read_text()
    names = re.search(r"^\| \| (torch .*) \|$", page, re.MULTILINE)[1].split(" | ")
    said = re.search(r"^\| lines of its file \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
    for backend, number in zip(names, said, strict=True):
        file = importlib.util.find_spec(f"lockstep.backends.{backend}").origin
        assert len(Path(file).read_text().splitlines()) == int(number), backend


def assert_exists(module: str, function: str) -> None:
    found = importlib.import_module("lockstep." + module.replace("/", "."))
    for part in function.split("."):
        assert hasattr(found, part), f"{module}.py has no {function}"
        found = getattr(found, part)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_has_a_gap_or_the_path_of_somebodys_machine(page):
    text = page.read_text()
    assert not re.search(r"@[A-Z_]+@", text)
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users)/", text)


def test_messages_that_pages_show_are_those_of_the_program():
    """The words around the values, of a line that begins with `lockstep: `, are somewhere in the source."""
    shown = re.findall(
        r"^lockstep: (.*?) \d+ s \(--timeout\): ", (ROOT / "docs" / "failures.md").read_text(), re.MULTILINE
    )
    source = "".join(path.read_text() for path in (ROOT / "src" / "lockstep" / "runtime").rglob("*.py"))
    assert shown == ["the others waited", "no sign of life for"]
    for words in shown:
        assert f"{words} {{self._timeout:g}} s (--timeout): " in source


def test_links_to_a_command_lead_to_its_own_page():
    for page in PAGES:
        for command, target in re.findall(r"\[`lockstep (\w+)`\]\(([\w/.-]+)\)", page.read_text()):
            own = page.parent / f"{command}.md"
            assert not own.exists() or target == own.name, f"{name(page)} links `lockstep {command}` to {target}"


def test_pages_exist():
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/tour.md"} <= {name(page) for page in PAGES}
