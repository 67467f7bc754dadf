"""Opens a run: prepared, with its folder locked, at step 1 or after the last checkpoint in the folder."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from lockstep.backends.hardware import cpu
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.entry_points import OWN, call_user_function, is_entry_point, load_entry_point
from lockstep.core.errors import ConfigError
from lockstep.core.registry import pick
from lockstep.report.console import fetch_progress
from lockstep.report.finished_log import FinishedLog
from lockstep.report.loggers import TENSORBOARD, LoggerSink, find_loggers
from lockstep.report.runlog import RunLog, read_settings
from lockstep.report.sinks import Sink, Sinks
from lockstep.training.checkpoint import Checkpoints, check_length, check_same_run, identity_of, max_bytes_of
from lockstep.training.resume_point import ResumePoint
from lockstep.training.setup import Prepared, prepare
from lockstep.training.task import UserObjects
from lockstep.training.weights import checked_weights


@contextmanager
def opened_run(
    config: RunConfig, objects: UserObjects | None, resume: bool, devices: list[Device] | None = None, logs: bool = True
) -> Iterator[tuple[Prepared, Sink | None, ResumePoint]]:
    """What a run needs, its log, and where it starts. If this process `logs`, the folder is locked until the end."""
    loggers = loggers_of(config, objects) if logs else None
    log = RunLog(config.out, is_resumed=resume) if logs and config.out is not None else None
    with fetch_progress() as progress:
        prepared = prepare(config, objects, progress, devices=devices)
    notes = notes_on_devices(config, prepared.devices) if devices is None else []
    if log is None:
        yield prepared, loggers, ResumePoint(notes=notes)
        return
    log.claim()
    with closing(log):
        try:
            start = find_resume_point(config, prepared, resume)
        except OSError as problem:
            hint = "Look for what fails on that disk, or choose another --out"
            raise ConfigError(f"{config.out} cannot be read: {problem.strerror}. {hint}.") from problem
        sinks: Sink = log if loggers is None else Sinks([log, loggers])
        if is_done(start, config):
            sinks = FinishedLog(log)
        yield prepared, sinks, replace(start, notes=[*notes, *start.notes])


def loggers_of(config: RunConfig, objects: UserObjects | None) -> LoggerSink | None:
    """The loggers of a run: objects that were given in Python, or what the settings name."""

    def load(name: str) -> Any:
        return call_user_function(load_entry_point(name, "logger"), "logger")

    given = config.logger if objects is None or objects.logger is None else objects.logger
    if isinstance(given, str) and given != TENSORBOARD and not is_entry_point(given):
        pick({TENSORBOARD: None}, given, "logger", more=OWN)
    return find_loggers(given, config.out, load)


def notes_on_devices(config: RunConfig, devices: list[Device]) -> list[str]:
    """What the user should know where there is less hardware than devices: more of them bring no speed then."""
    distinct, num_cores = sorted(set(devices)), cpu().num_cores
    if devices[0].kind == "cpu" and len(devices) > num_cores:
        cores = f"{num_cores} core{'s' * (num_cores > 1)}"
        return [f"{len(devices)} logical CPU devices share {cores}: more than {num_cores} bring no speed."]
    if len(distinct) < len(devices) and "," not in str(config.devices):
        has = f"{len(distinct)} GPU" + ("s, which are" if len(distinct) > 1 else ", which is")
        return [f"There {'are' if len(distinct) > 1 else 'is'} {has} listed more than once: {', '.join(devices)}."]
    return []


def find_resume_point(config: RunConfig, prepared: Prepared, resume: bool) -> ResumePoint:
    """Where the run in `config.out` starts: after its last checkpoint, if it is resumed and has one."""
    assert config.out is not None
    checkpoints = Checkpoints(config.out, config.keep_checkpoints)
    if not resume:
        return ResumePoint(checkpoints=checkpoints)
    task, notes = prepared.task, list[str]()
    newest = checkpoints.newest(notes.append, max_bytes_of(task.initial))
    identity = identity_of(config, task)
    if newest is None:
        if (config.out / "result.json").exists():
            raise ConfigError(f"The run in {config.out} is finished and has no checkpoint left. Choose another --out.")
        if (config.out / "config.json").exists():
            recorded = read_settings(config.out)
            check_same_run({**identity, **{n: recorded[n] for n in identity if n in recorded}}, identity, config)
        notes.append(f"There is no checkpoint in {config.out}: starting at step 1.")
        return ResumePoint(notes=notes, checkpoints=checkpoints)
    path, found = newest
    check_same_run(found.run, identity, config)
    check_length(found.progress, config, task.num_train)
    checked_weights(task.initial, found.weights, path, config.model)
    start = ResumePoint(found, notes, checkpoints=checkpoints)
    if is_done(start, config):
        notes.append("the run is done: it stays as it is; for more epochs, use --epochs")
    else:
        notes.append(f"continuing after step {found.progress.step}")
    return start


def is_done(start: ResumePoint, config: RunConfig) -> bool:
    """Whether the run has no step left."""
    return start.checkpoint is not None and len(start.checkpoint.progress.history) == config.num_epochs
