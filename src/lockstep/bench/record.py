"""A bench from end to end: checked, measured, and recorded with the machine and the versions it was measured on."""

import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.backends import devices_for, load_backend
from lockstep.bench.contenders import CONTENDERS, OURS, usual_contenders
from lockstep.bench.rounds import Say, measure_exchanges, measure_model
from lockstep.bench.tables import Table
from lockstep.bench.work import DEFAULT_MODELS, samples_of, work_for
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.registry import pick
from lockstep.report.console import fetch_progress
from lockstep.report.runlog import to_json, write_whole

PACKAGES = ("numpy", "lightning-fabric", "lightning", "accelerate")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user wants to be measured; None is what suits the model and the device."""

    devices: str | None = None
    models: str = DEFAULT_MODELS  # names with commas; nothing: none
    only: str | None = None  # contenders, names with commas
    num_trials: int = 5
    num_steps: int | None = None
    batch_size: int | None = None
    precision: str = "fp32"
    data: str = "fashion-mnist"
    data_dir: Path | None = None
    settings: dict[str, Any] | None = None
    exchanges: bool = True


def bench(asked: Asked, command: str, say: Say) -> tuple[dict[str, Any], list[Table]]:
    """The record of what was measured, and its tables. What cannot be is refused before anything is started."""
    if asked.num_trials < 1:
        raise ConfigError(f"{asked.num_trials} trials measure nothing. Use 1 or more, 5 for a median (--trials).")
    backend = load_backend("torch")
    devices = devices_for(backend, asked.devices, at_most=8)
    is_on_gpu = devices[0].kind == "cuda"
    names = contenders_for(asked.only, len(devices), is_on_gpu)
    works = [
        work_for(
            model,
            devices,
            asked.precision,
            num_steps=asked.num_steps,
            batch_size=asked.batch_size,
            data=asked.data,
            data_dir=None if asked.data_dir is None else str(asked.data_dir.resolve()),
            settings=asked.settings,
        )
        for model in split_names(asked.models)
    ]
    if not works and not asked.exchanges:
        raise ConfigError("There is nothing to measure: name a model (--models), or leave --no-exchanges out.")
    for work, _ in works:
        with fetch_progress() as progress:
            samples_of(work, progress)
    tables = [measure_model(work, notes, names, asked.num_trials, say) for work, notes in works]
    if asked.exchanges:
        tables += measure_exchanges(devices, asked.num_trials, say)
    record = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": [f"{h.name}, {h.num_cores} cores, {h.num_bytes / 2**30:.0f} GiB" for h in backend.hardware()],
        "device": "cuda" if is_on_gpu else "cpu",
        "versions": versions(backend.version()),
        "tables": [table.plain() for table in tables],
    }
    return record, tables


def contenders_for(only: str | None, num_devices: int, is_on_gpu: bool) -> list[str]:
    """The contenders that were asked for, ours among them: the others are compared with it."""
    if only is None:
        return usual_contenders(num_devices, is_on_gpu)
    wanted = {OURS, *split_names(only)}
    for name in sorted(wanted):
        pick(CONTENDERS, name, "contender")
    return [name for name in CONTENDERS if name in wanted]


def split_names(text: str) -> list[str]:
    """The names in a list with commas, each once.

    >>> split_names("lenet, resnet18,lenet")
    ['lenet', 'resnet18']
    """
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def versions(of_torch: str) -> dict[str, str]:
    """What was measured with; what is not installed is left out."""
    found = {"python": platform.python_version(), "lockstep": __version__, "torch": of_torch}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def title_of(record: dict[str, Any]) -> str:
    """Device, versions and date, for the picture."""
    device = record["machine"][0 if record["device"] == "cuda" else -1]
    said = ", ".join(f"{name} {number}" for name, number in record["versions"].items() if name != "numpy")
    return f"{device}; {record['date']}\n{said}"


def save(record: dict[str, Any], tables: list[Table], folder: Path) -> list[Path]:
    """Writes bench-cpu.json and bench-cpu.png, or those of cuda, into `folder`."""
    from lockstep.bench.picture import draw_tables  # matplotlib takes half a second to load

    paths = [folder / f"bench-{record['device']}.{kind}" for kind in ("json", "png")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(paths[0], lambda path: path.write_text(to_json(record, indent=2) + "\n", encoding="utf-8"))
        write_whole(paths[1], lambda path: draw_tables(tables, title_of(record), path))
    except OSError as problem:
        raise RunError(f"{folder} cannot be written to: {problem.strerror}. Choose another --out.") from problem
    return paths
