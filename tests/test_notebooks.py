"""The notebook is executed from its first cell to its last in a real kernel, as a reader would."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")  # in the extra `dev`
NotebookClient = pytest.importorskip("nbclient").NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "training_on_multiple_gpus.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook, executed; its cells hold what they showed."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
    return notebook


def shown(notebook, kind="text/plain"):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.text for output in outputs if output.output_type == "stream" and kind == "text/plain"]
    return texts + ["".join(output.data.get(kind, "")) for output in outputs if "data" in output]


@pytest.mark.filterwarnings("ignore")  # of the kernel's client: its event loop, its folders
def test_the_notebook_runs_and_answers_the_exercises_from_what_it_measured(executed):
    text = "\n".join(shown(executed))
    for number in (1, 2, 3, 4):
        assert f"Exercise {number}: " in text
    best = re.search(r"best learning rate is ([\d.]+) for batches of 50 .* and ([\d.]+) for batches of 100", text)
    table = re.findall(r"^1 +50 +([\d.]+) +([\d.]+) ", text, re.MULTILINE)
    assert best[1] == max(table, key=lambda row: float(row[1]))[0], "the answer is what the table says"


@pytest.mark.filterwarnings("ignore")
def test_a_run_shows_its_curve_and_its_epochs_in_the_cell_with_both_engines(executed):
    pages = [page for page in shown(executed, "text/html") if "lockstep-run" in page]
    assert len(pages) == 2, "one in threads, one in processes"
    for page in pages:
        assert page.count("<svg") == 2
        assert "<progress" not in page, "the bar is gone at the end"
    assert "engine inprocess" in pages[0]
    assert "engine processes" in pages[1]
    assert len([picture for picture in shown(executed, "image/png") if picture]) == 2
    errors = [output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    assert errors == []


def test_it_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
