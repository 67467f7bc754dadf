"""What several tests use: a tiny data set, and the command line without a new process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from typer.testing import CliRunner

from lockstep.cli import app

settings.register_profile("lockstep", deadline=None)  # a shared machine may stop for a moment at any time
settings.load_profile("lockstep")


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
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="lockstep")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 70 training and 30 test images, as a .npz file: one image of each class, with noise."""
    random = np.random.RandomState(1)
    y_train, y_test = np.arange(70) % 10, np.arange(30) % 10
    prototypes = random.randint(0, 200, (10, 28, 28))
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    np.savez(
        path,
        X_train=(prototypes[y_train] + random.randint(0, 56, (70, 28, 28))).astype(np.uint8),
        y_train=y_train,
        X_test=(prototypes[y_test] + random.randint(0, 56, (30, 28, 28))).astype(np.uint8),
        y_test=y_test,
    )
    return path
