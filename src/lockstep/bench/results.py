"""Results of benchmarks, kept by commit: every run appends one line of JSON to a file NAME.jsonl."""

import platform
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.backends import load_backend
from lockstep.core.files import write_whole
from lockstep.report.runlog import to_json

RESULTS = Path("benchmarks/results")
PACKAGES = ("numpy", "lightning-fabric", "lightning", "accelerate")


def describe_run(*command: str) -> dict[str, Any]:
    """What a result has to say besides its numbers: commit, date, command, machine and versions."""
    backend = load_backend("torch")
    return {
        "commit": current_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(command),
        "machine": [f"{h.name}, {h.num_cores} cores, {h.num_bytes / 2**30:.0f} GiB" for h in backend.hardware()],
        "versions": {"torch": backend.version()} | installed_versions(),
    }


def append_result(path: Path, result: dict[str, Any]) -> None:
    """Adds one line to `path`: whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    write_whole(path, lambda part: part.write_text(f"{earlier}{to_json(result)}\n", encoding="utf-8"))


def current_commit() -> str:
    """The commit checked out in the working directory, like 28f0576; 28f0576-dirty if there are uncommitted changes.

    Results do not count as changes. Outside a git checkout: unknown.
    """
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(top,exclude){RESULTS}")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changes else head


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def installed_versions() -> dict[str, str]:
    """The versions of Python, Lockstep and those of `PACKAGES` that are installed."""
    versions = {"python": platform.python_version(), "lockstep": __version__}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
