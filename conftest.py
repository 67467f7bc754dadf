"""Doctests import every module; what needs a framework that is not installed is left out."""

from importlib.util import find_spec
from pathlib import Path

from lockstep.backends import BACKENDS, is_installed

collect_ignore = ["tests/text_programs"]
missing = [name for name in BACKENDS if not is_installed(name)]
collect_ignore += [f"src/lockstep/backends/{name}{ending}" for name in missing for ending in ("", ".py")]
if find_spec("triton") is None:  # PyTorch for GPUs brings it
    files = (Path(__file__).parent / "src/lockstep/backends/torch").rglob("*.py")
    collect_ignore += [str(file) for file in files if "\nimport triton\n" in file.read_text()]
