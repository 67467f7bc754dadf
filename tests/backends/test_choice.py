"""Choosing the framework and the devices: by name, or from the tensors passed in."""

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.backends import BACKENDS, backend_of, devices_for, is_installed, load_backend, named_devices
from lockstep.core.device import Device
from lockstep.core.errors import BackendError, ConfigError, DeviceError

SOURCE = Path(lockstep.__file__).parents[1]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_a_missing_framework_is_an_error_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(BACKENDS, "missing_framework", "pip install missing-framework==1.0")
    with pytest.raises(BackendError) as refused:
        load_backend("missing_framework")
    assert str(refused.value).startswith(
        "The backend 'missing_framework' needs the package missing_framework, which is not installed. "
        "Install it: pip install missing-framework==1.0; or use what is here (--backend, backend=...): "
    )
    assert str(refused.value).endswith("numpy.")


def test_a_framework_that_cannot_be_imported_is_an_error_in_one_line(tmp_path):
    """As MXNet with a new numpy."""
    (tmp_path / "mxnet.py").write_text("raise AttributeError('numpy has no attribute bool\\nand more')")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", "--backend", "mxnet"],
        env={"PYTHONPATH": f"{tmp_path}:{SOURCE}", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "lockstep: The backend 'mxnet' cannot be used: importing mxnet fails with AttributeError: numpy has no "
        "attribute bool. Install it: python3.11 -m pip install mxnet==1.9.1 numpy==1.23.5; or use what is here "
    )
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("version", "min_version", "is_accepted"),
    [
        ("2.8.1+cu128", (2, 9), False),
        ("1.13.1", (2, 9), False),
        ("2.9.0a0+git1234567", (2, 9), True),
        ("2.10.0+cpu", (2, 9), True),
        ("3", (2, 9), True),
        ("0.4.38", (0, 5), False),
    ],
)
def test_a_framework_that_is_too_old_is_refused(monkeypatch, version, min_version, is_accepted):
    numpy = type(load_backend("numpy"))
    monkeypatch.setattr(numpy, "min_version", min_version)
    monkeypatch.setattr(numpy, "version", lambda self: version)
    load_uncached = load_backend.__wrapped__
    if is_accepted:
        assert load_uncached("numpy").version() == version
        return
    with pytest.raises(BackendError) as refused:
        load_uncached("numpy")
    needed = ".".join(map(str, min_version))
    assert str(refused.value) == f"numpy {version} is too old for Lockstep. Install {needed} or newer."


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'torch'"):
        load_backend("troch")


def test_the_framework_of_a_subclass_is_recognised():
    class Mine(np.ndarray):
        pass

    assert backend_of(np.ones(1).view(Mine)).name == "numpy"
    for wrong in (None, 1.0, "tensor", [1.0], object(), np.random.RandomState(0)):
        with pytest.raises(BackendError, match=f"A {type(wrong).__name__} is not a tensor of a known framework"):
            backend_of(wrong)


def test_installed_means_that_the_package_can_be_found():
    assert is_installed("numpy")
    assert not is_installed("missing_framework")


def test_no_other_file_names_a_framework():
    """import-linter checks imports; this test checks names, defaults, messages and examples.

    The files that may name one are those of the import contract, the table of backends beside them, `bench`, and the
    file that chooses whose modules are trained. torchrun is a program; two functions of PyTorch are named to users.
    """
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
    (imports,) = (c["ignore_imports"] for c in contracts if c["name"] == "A framework is named in its own backend only")
    allowed = [line.partition(" -> ")[0] for line in imports]
    allowed += ["lockstep.backends.*", "lockstep.bench.*", "lockstep.training.setup", "lockstep.training.module_split"]
    frameworks = re.compile("|".join(name for name in BACKENDS if name != "numpy"), re.IGNORECASE)
    files = {".".join(file.relative_to(SOURCE).with_suffix("").parts): file for file in SOURCE.rglob("*.py")}
    checked = {name: file for name, file in files.items() if not any(fnmatchcase(name, glob) for glob in allowed)}
    assert len(checked) > 40
    words = re.compile(
        r"torchrun|torchmetrics|TORCHELASTIC\w*|torch\.compile|torch\.manual_seed|TorchTrainer|torch\.distributed",
        re.IGNORECASE,
    )
    assert [name for name, file in checked.items() if frameworks.search(words.sub("", file.read_text()))] == []


class TwoGpus:
    def num_gpus(self):
        return 2


class NoGpu:
    def num_gpus(self):
        return 0


def test_by_default_all_gpus_are_used_or_else_a_logical_device_for_each_core():
    assert devices_for(TwoGpus(), None) == ["cuda:0", "cuda:1"]
    assert devices_for(NoGpu(), None) == [f"cpu:{i}" for i in range(len(os.sched_getaffinity(0)))]
    assert devices_for(NoGpu(), None, at_most=1) == ["cpu:0"]
    assert devices_for(TwoGpus(), 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices_for(TwoGpus(), "cuda:1,cuda:1") == ["cuda:1", "cuda:1"]


def test_named_devices_must_exist_and_the_cpu_may_be_listed_twice():
    assert named_devices(NoGpu(), ("cpu", "cpu:0", "cpu:1")) == ["cpu:0", "cpu:0", "cpu:1"]
    assert named_devices(TwoGpus(), ["cuda:1", "cuda"]) == ["cuda:1", "cuda:0"]
    assert all(isinstance(device, Device) for device in named_devices(NoGpu(), ["cpu"]))


@pytest.mark.parametrize(
    ("machine", "names", "sentence"),
    [
        (NoGpu(), ["cuda"], "There is no cuda:0: no GPU is visible on this machine"),
        (TwoGpus(), ["cuda:2"], "There is no cuda:2: this machine has cuda:0, cuda:1"),
        (TwoGpus(), ["cpu:0", "cuda:0"], "cpu:0, cuda:0 mixes CPU and GPU"),
        (TwoGpus(), [], "The list of devices is empty"),
        (TwoGpus(), ["gpu"], "'gpu' is not the name of a device"),
    ],
)
def test_named_devices_that_do_not_exist_are_refused(machine, names, sentence):
    with pytest.raises(DeviceError) as refused:
        named_devices(machine, names)
    assert str(refused.value).startswith(sentence)
