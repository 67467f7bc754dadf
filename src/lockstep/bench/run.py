"""`lockstep bench` from end to end: settings are checked, contenders measured, results saved."""

import os
from pathlib import Path
from typing import Any

from lockstep.backends import devices_for, load_backend
from lockstep.bench.contenders import CONTENDERS, OURS, default_contenders
from lockstep.bench.measure import Log, measure_exchanges, measure_model
from lockstep.bench.results import append_result, describe_run
from lockstep.bench.tables import Table
from lockstep.bench.workload import load_samples, workload_for
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.files import write_whole
from lockstep.core.registry import pick
from lockstep.report.console import fetch_progress


def run_bench(
    *,
    devices: str | None,
    models: str,  # comma-separated
    only: str | None,  # contenders, comma-separated
    num_trials: int,
    exchanges: bool,
    command: str,
    log: Log,
    **workload: Any,  # see `workload_for`
) -> tuple[dict[str, Any], list[Table]]:
    """The result, and its tables. What is impossible is refused before anything is started."""
    if num_trials < 1:
        raise ConfigError(f"{num_trials} trials measure nothing. Use 1 or more, 5 for a median (--trials).")
    found = devices_for(load_backend("torch"), devices, at_most=8)
    is_on_gpu = found[0].kind == "cuda"
    names = contenders_for(only, len(found), is_on_gpu)
    workloads = [workload_for(model, found, **workload) for model in split_names(models)]
    if not workloads and not exchanges:
        raise ConfigError("There is nothing to measure: name a model (--models), or leave --no-exchanges out.")
    for each, _ in workloads:
        with fetch_progress() as progress:
            load_samples(each, progress)
    tables = [measure_model(each, notes, names, num_trials, log) for each, notes in workloads]
    if exchanges:
        tables += measure_exchanges(found, num_trials, log)
    result = {"device": "cuda" if is_on_gpu else "cpu", "tables": [table.to_dict() for table in tables]}
    return describe_run(command) | result, tables


def contenders_for(only: str | None, num_devices: int, is_on_gpu: bool) -> list[str]:
    """The contenders that were chosen, always with ours: the others are compared with it."""
    if only is None:
        return default_contenders(num_devices, is_on_gpu)
    chosen = {OURS, *split_names(only)}
    for name in sorted(chosen):
        pick(CONTENDERS, name, "contender")
    return [name for name in CONTENDERS if name in chosen]


def split_names(text: str) -> list[str]:
    """The names in a comma-separated list, each once.

    >>> split_names("lenet, resnet18,lenet")
    ['lenet', 'resnet18']
    """
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check_writable(folder: Path) -> None:
    """Refuses a folder that results cannot be written to, before anything is measured."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "is not writable" if nearest.is_dir() else "is a file"
        raise ConfigError(f"Results cannot be written to {folder}: {nearest} {why}. Choose another --out.")


def save_results(result: dict[str, Any], tables: list[Table], folder: Path) -> list[Path]:
    """Appends to bench-cpu.jsonl in `folder` and draws bench-cpu.png, or those of cuda."""
    from lockstep.bench.plots import draw_tables  # matplotlib takes half a second to load

    results, picture = (folder / f"bench-{result['device']}.{suffix}" for suffix in ("jsonl", "png"))
    try:
        append_result(results, result)
        write_whole(picture, lambda path: draw_tables(tables, plot_title(result), path))
    except OSError as problem:
        raise RunError(f"{folder} cannot be written to: {problem.strerror}. Choose another --out.") from problem
    return [results, picture]


def plot_title(result: dict[str, Any]) -> str:
    """Device, date, commit and versions."""
    device = result["machine"][0 if result["device"] == "cuda" else -1]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items() if name != "numpy")
    return f"{device}; {result['date']}, commit {result['commit']}\n{versions}"
