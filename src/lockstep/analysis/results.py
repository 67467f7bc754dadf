"""A plan in a file: one line of JSON, with the machine and the versions that it was made with."""

import tempfile
import time
from pathlib import Path
from typing import Any

from lockstep.analysis.check import summary_of
from lockstep.analysis.plan import Plan
from lockstep.backends.hardware import cpu
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.files import write_whole
from lockstep.report.runlog import package_version, to_json


def check_writable(path: Path) -> None:
    """Refuses a file that cannot be written, before anything is measured."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder. Name a file, like {path / 'plan.jsonl'}.")
    try:
        with tempfile.TemporaryFile(dir=folder):  # it will be replaced by a new one
            pass
    except OSError as problem:
        raise ConfigError(
            f"--out {path} cannot be written: there is no folder {folder} that can be written to ({problem.strerror})."
        ) from problem


def record_of(plan: Plan) -> dict[str, Any]:
    """What is kept of a plan."""
    hardware = cpu()
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "title": plan.title,
        "machine": f"{hardware.name}, {hardware.num_cores} cores",
        "lockstep": package_version(),
        **plan.plain(),
    }
    if any(row.measured_ms is not None for row in plan.rows):
        found["check"] = summary_of(plan)._asdict()
    return found


def save(plan: Plan, path: Path) -> None:
    """Appends a plan to a file."""
    try:
        earlier = path.read_bytes() if path.exists() else b""
        write_whole(path, lambda part: part.write_bytes(earlier + f"{to_json(record_of(plan))}\n".encode()))
    except OSError as problem:
        raise RunError(f"The plan cannot be written to {path}: {problem.strerror}.") from problem
