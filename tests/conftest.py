"""What several tests use: a tiny dataset, and the command line without a new process."""

import io
import json
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings

from lockstep.cli import main

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes most of a GPU, which other tests need

# A shared machine may stop for a moment at any time. The same examples in every run, so that a test turns red because
# of a change; LOCKSTEP_EXPLORE=1 draws others.
settings.register_profile("lockstep", deadline=None, derandomize="LOCKSTEP_EXPLORE" not in os.environ)
settings.load_profile("lockstep")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m cuda`, files without such a test are not imported: all of them take ten seconds, in every worker."""
    if config.getoption("markexpr") == "cuda" and collection_path.suffix == ".py":
        return "pytest.mark.cuda" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With `-m cuda`, as many tests at a time as there are cores, up to 14, unless -n says something else."""
    options, is_worker = config.option, hasattr(config, "workerinput")
    num_workers = min(14, (os.cpu_count() or 1) - 2)
    wants_one = is_worker or options.usepdb or options.markexpr != "cuda" or getattr(options, "dist", "") != "no"
    if not wants_one and getattr(options, "numprocesses", 0) is None and num_workers > 1:
        options.numprocesses, options.dist, options.maxschedchunk = num_workers, "load", 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start programs, or send signals, are run once more if they fail; the summary names them.

    On a busy machine a process can be late by more than any time-out that is worth waiting for. Where something is
    really wrong, the second time is red, too. On a GPU they take longest, and come first: so all workers are busy to
    the end.
    """
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in filter(_starts_programs, items):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.getoption("markexpr") == "cuda":
        items.sort(key=_starts_programs, reverse=True)


def _starts_programs(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    return module is not None and bool({"subprocess", "signal"} & vars(module).keys())


class Answer(NamedTuple):
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def lockstep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Runs `lockstep ARGUMENTS` in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Answer:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        return Answer(left.value.code or 0, out.getvalue(), err.getvalue())

    return run


def write_npz(path: Path, num_train: int, num_test: int) -> Path:
    """A dataset with one image for each class, and noise."""
    random = np.random.RandomState(1)
    y_train, y_test = np.arange(num_train) % 10, np.arange(num_test) % 10
    prototypes = random.randint(0, 200, (10, 28, 28))
    np.savez(
        path,
        X_train=(prototypes[y_train] + random.randint(0, 56, (num_train, 28, 28))).astype(np.uint8),
        y_train=y_train,
        X_test=(prototypes[y_test] + random.randint(0, 56, (num_test, 28, 28))).astype(np.uint8),
        y_test=y_test,
    )
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 260 training and 30 test images, as a .npz file: a batch of 256 and a short one."""
    return write_npz(tmp_path_factory.mktemp("data") / "tiny.npz", 260, 30)


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 24 training and 10 test images, for batches of a few samples."""
    return write_npz(tmp_path_factory.mktemp("data") / "few.npz", 24, 10)


@pytest.fixture
def vectors():
    """40 samples of six numbers, with labels of three classes, as PyTorch tensors."""
    import torch  # not in the environments of the other frameworks

    generator = torch.Generator().manual_seed(0)
    return torch.rand(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
