"""Opens a run: prepared, with its folder locked, at step 1 or after the last checkpoint in the folder."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError
from lockstep.report.console import fetch_progress
from lockstep.report.runlog import RunLog, read_settings
from lockstep.training.checkpoint import Checkpoints, check_length, check_same_run, identity_of, max_bytes_of
from lockstep.training.loop import ResumePoint
from lockstep.training.setup import Prepared, prepare
from lockstep.training.task import UserObjects
from lockstep.training.weights import checked_weights


@contextmanager
def opened_run(
    config: RunConfig, objects: UserObjects | None, resume: bool, devices: list[Device] | None = None, logs: bool = True
) -> Iterator[tuple[Prepared, RunLog | None, ResumePoint]]:
    """What a run needs, its log, and where it starts. If this process `logs`, the folder is locked until the end."""
    log = RunLog(config.out, is_resumed=resume) if logs and config.out is not None else None
    with fetch_progress() as progress:
        prepared = prepare(config, objects, progress, devices=devices)
    if log is None:
        yield prepared, None, ResumePoint()
        return
    log.claim()
    with closing(log):
        yield prepared, log, find_resume_point(config, prepared, resume)


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
    if len(found.progress.history) == config.num_epochs:
        notes.append(f"all {config.num_epochs} epochs are done; for more, use --epochs")
    else:
        notes.append(f"continuing after step {found.progress.step}")
    return ResumePoint(found, notes, checkpoints=checkpoints)
