"""The secret by which processes that torchrun has started know each other."""

import os
import stat

import pytest

from lockstep.core.errors import ConfigError
from lockstep.core.secret import secret_for


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCKSTEP_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def test_it_is_made_once_and_only_its_user_can_read_it(home):
    first = secret_for("a run")
    file = home / "lockstep" / "secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["secret"]
    assert secret_for("a run") == first
    assert secret_for("another run") != first
    file.write_text("x" * 32)
    assert secret_for("a run") != first


def test_one_that_is_named_is_used(tmp_path, monkeypatch):
    file = tmp_path / "shared"
    file.write_text("y" * 32)
    file.chmod(0o600)
    monkeypatch.setenv("LOCKSTEP_SECRET_FILE", str(file))
    assert secret_for("a run") == secret_for("a run")
    assert not (tmp_path / "config").exists()


@pytest.mark.parametrize("how", ["missing", "open to others", "short", "a pipe"])
def test_one_that_is_none_is_refused(tmp_path, monkeypatch, how):
    file = tmp_path / "shared"
    if how == "a pipe":
        os.mkfifo(file, 0o600)
    elif how != "missing":
        file.write_text("short" if how == "short" else "y" * 32)
        file.chmod(0o644 if how == "open to others" else 0o600)
    monkeypatch.setenv("LOCKSTEP_SECRET_FILE", str(file))
    with pytest.raises(ConfigError, match=r"The secret in|Others can read the secret"):
        secret_for("a run")


def test_where_there_is_no_place_for_it_there_is_none(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert secret_for("a run") is None
