"""The loop of the guide in a notebook: executed in a real kernel."""

import pytest

nbformat = pytest.importorskip("nbformat")  # in the extra `dev`
NotebookClient = pytest.importorskip("nbclient").NotebookClient

SETUP = """
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

draw = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 6, generator=draw), torch.randint(3, (96,), generator=draw))
loader = DataLoader(data, batch_size=32)

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
"""
LOOP = """
trainer = lockstep.Trainer(net(), optimizer="adam", loss="cross_entropy", devices=2, shards=8, seed=0, lr=0.01)
for epoch in range(2):
    for batch in loader:
        out = trainer.step(batch)
found = trainer.evaluate(loader)
sha256 = trainer.weights_sha256
trainer.save("saved")
print(out.step, sorted(found))
"""
AGAIN = """
resumed = lockstep.Trainer.load("saved", model=net(), devices=3)  # the first is still open, as cells leave it
for trainer in (trainer, resumed):
    trainer.step(batch)
print(trainer.weights_sha256 == resumed.weights_sha256)
"""
RUNS = """
results = [lockstep.train(2, model=net(), data=data, batch_size=32, epochs=1, lr=0.1, engine=engine, quiet=True)
           for engine in ("inprocess", "processes")]
print(len({result.weights_sha256 for result in results}))
"""


INTERRUPTED = """
import os, signal, lockstep
kernel = os.getpid()

def interrupt(run):
    if run.step == 3:
        os.kill(kernel, signal.SIGINT)

lockstep.train(2, data="fashion-mnist-mini", batch_size=250, epochs=400, on_step=interrupt, engine="{engine}")
"""
AFTER = "import sys; result = sys.last_value.result; print(result.steps >= 3)"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["inprocess", "processes"])
def test_an_interrupted_cell_says_so_is_short_and_keeps_the_result(engine, tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in (INTERRUPTED.format(engine=engine), AFTER)]
    how = {
        "timeout": 120,
        "kernel_name": "python3",
        "allow_errors": True,
        "resources": {"metadata": {"path": tmp_path}},
    }
    NotebookClient(nbformat.v4.new_notebook(cells=cells), **how).execute()
    streams = "".join(each.text for each in cells[0].outputs if each.get("name") == "stderr")
    assert streams == "stopping after this step; interrupt again to end it now\n"
    (error,) = [each for each in cells[0].outputs if each.output_type == "error"]
    assert error.ename == "Interrupted"
    assert "Get the result so far in the next cell: import sys; result = sys.last_value.result;" in error.evalue
    assert sum(entry.count("\n") + 1 for entry in error.traceback) < 25
    assert cells[1].outputs[0].text == "True\n"


@pytest.mark.filterwarnings("ignore")  # of the kernel's client: its event loop, its folders
def test_a_loop_and_a_run_in_the_cells_of_a_notebook(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, LOOP, AGAIN, RUNS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    printed = ["".join(each.text for each in cell.outputs if each.get("name") == "stdout") for cell in cells[1:]]
    assert printed == ["6 ['accuracy', 'loss']\n", "True\n", "1\n"]
