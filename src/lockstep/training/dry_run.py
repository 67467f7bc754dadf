"""`lockstep train --dry-run`: everything is looked up and checked as for a run; nothing is trained or recorded."""

from dataclasses import asdict
from typing import Any, NamedTuple

from lockstep.config import RunConfig, check_batch
from lockstep.core.errors import ConfigError
from lockstep.core.torchrun_env import torchrun_env
from lockstep.report.console import description, fetch_progress
from lockstep.report.events import RunStarted
from lockstep.report.runlog import RunLog
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.training.auto_split import with_split
from lockstep.training.resume import find_resume_point, notes_on_devices
from lockstep.training.setup import prepare, with_engine


class Described(NamedTuple):
    """A run that was not started."""

    lines: list[str]
    facts: dict[str, Any]


def dry_run(config: RunConfig, resume: bool = False) -> Described:
    """What a run with these settings would be."""
    if torchrun_env():
        raise ConfigError("--dry-run looks at one machine. Leave torchrun out.")
    config, objects, notes = with_split(with_engine(config), None)
    if config.out is not None:
        RunLog(config.out, is_resumed=resume)  # refuses a folder that cannot be used
    with fetch_progress() as progress:
        prepared = prepare(config, objects, progress)
    task = prepared.task
    check_batch(config.batch_size, task.num_train, config.data)
    steps_per_epoch = -(-task.num_train // config.batch_size)
    start = find_resume_point(config, prepared, resume) if resume and config.out else None
    started = RunStarted(
        config=asdict(config),
        data_sha256=task.data_sha256,
        backend_version=prepared.backend.version(),
        devices=list(map(str, prepared.devices)),
        num_train_samples=task.num_train,
        num_test_samples=task.num_test,
        num_parameters=sum(array.size for name, array in task.whole(task.initial).items() if name in task.parameters),
        steps_per_epoch=steps_per_epoch,
        keeps_bits=config.exchange in KEEPS_THE_TREE,
        model=task.model,
        notes=[*task.notes, *notes, *notes_on_devices(config, prepared.devices), *(start.notes if start else [])],
    )
    steps = config.num_epochs * steps_per_epoch
    shard = -(-config.batch_size // config.num_shards)
    length = f"{steps:,} steps: {steps_per_epoch:,} an epoch, {config.num_epochs} epoch{'s' * (config.num_epochs > 1)}"
    lines = [*description(started), f"{length}; shards of {shard} samples", "Nothing was trained or written."]
    return Described(lines, {**asdict(started), "steps": steps})
