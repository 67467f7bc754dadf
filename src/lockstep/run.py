"""A run from end to end: everything is checked, then trained, shown and recorded."""

from contextlib import ExitStack
from dataclasses import replace

from lockstep.checkpoint import Checkpoints, check_same_run, identity_of, made_with
from lockstep.config import RunConfig
from lockstep.engines import InProcess
from lockstep.epochs import Start, Training
from lockstep.errors import ConfigError
from lockstep.evaluate import checked_weights
from lockstep.interrupts import Interrupts
from lockstep.prepare import Prepared, prepare
from lockstep.report.console import fetch_progress
from lockstep.report.events import Result
from lockstep.report.runlog import RunLog
from lockstep.reporting import report
from lockstep.split.balance import balance_for
from lockstep.task import Given


def run(config: RunConfig, given: Given | None = None, quiet: bool = False, resume: bool = False) -> Result:
    """The result of a run, shown on standard error unless `quiet`, and recorded if `config.out` names a folder."""
    if resume and config.out is None:
        raise ConfigError("There is no run to go on with. Name its folder: --out runs/NAME (out=...).")
    log = None if config.out is None else RunLog(config.out, is_resumed=resume)
    with fetch_progress() as progress:
        prepared = prepare(config, given, progress)
    with ExitStack() as undo:
        start = Start()
        if log is not None:
            log.claim()
            undo.callback(log.close)
            start = find_start(config, prepared, resume)
        if config.engine == "processes":
            from lockstep.elastic import train_in_processes  # needs its framework

            return train_in_processes(config, prepared, start, log, quiet)
        interrupts = undo.enter_context(Interrupts())
        start = replace(start, is_stopping=lambda: interrupts.requested)
        engine = InProcess(prepared.backend, prepared.devices, config.exchange, balance_for(config.balance))
        with engine:
            return report(Training(config, prepared, engine, start).events(), log, quiet)


def find_start(config: RunConfig, prepared: Prepared, resume: bool) -> Start:
    """Where the run in `config.out` begins: at its last checkpoint, if it is to go on and has one."""
    assert config.out is not None, "there is a folder"
    checkpoints = Checkpoints(config.out, config.keep_checkpoints)
    if not resume:
        return Start(checkpoints=checkpoints)
    task, notes = prepared.task, list[str]()
    found = checkpoints.newest(notes.append)
    if found is None:
        return Start(notes=[f"There is no checkpoint in {config.out}: beginning at step 1."], checkpoints=checkpoints)
    check_same_run(found, identity_of(config, task.data_sha256, task.num_train), config)
    checked_weights(task.initial, found.weights, checkpoints.paths()[0], config.model)
    now = made_with(prepared.backend.version(), prepared.devices)
    for name, value in now.items():
        if found.made_with.get(name) != value:
            notes.append(
                f"The checkpoint was made with another {name.replace('_', ' ')}, {found.made_with.get(name)}, and this "
                f"is {value}: from here on the bits may be others."
            )
    notes.append(f"going on after step {found.progress.step}")
    return Start(found, notes, checkpoints=checkpoints)
