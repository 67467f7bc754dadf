"""A run from end to end: everything is checked, then trained, shown and recorded."""

from contextlib import ExitStack
from dataclasses import replace

from lockstep.config import RunConfig
from lockstep.runtime import InProcess
from lockstep.training.loop import Start, Training
from lockstep.core.errors import ConfigError
from lockstep.core.interrupts import Interrupts
from lockstep.core.torchrun_env import place_of_this_process
from lockstep.training.setup import prepare
from lockstep.report.console import fetch_progress
from lockstep.report.events import Result
from lockstep.report.runlog import RunLog
from lockstep.training.reporting import report
from lockstep.partition.balance import balance_for
from lockstep.training.resume import find_start
from lockstep.training.task import Given


def run(config: RunConfig, given: Given | None = None, quiet: bool = False, resume: bool = False) -> Result:
    """The result of a run, shown on standard error unless `quiet`, and recorded if `config.out` names a folder."""
    if resume and config.out is None:
        raise ConfigError("There is no run to go on with. Name its folder: --out runs/NAME (out=...).")
    if place := place_of_this_process():
        from lockstep.training.torchrun import train_under_torchrun  # loads its framework

        return train_under_torchrun(replace(config, engine="processes"), place, given, quiet, resume)
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
            from lockstep.training.elastic import train_in_processes  # loads its framework

            return train_in_processes(config, prepared, start, log, quiet)
        interrupts = undo.enter_context(Interrupts(says=not quiet))
        start = replace(start, is_stopping=lambda: interrupts.requested)
        balance = balance_for(config.balance)
        with InProcess(
            prepared.backend,
            prepared.devices,
            config.exchange,
            balance,
            config.timeout,
            records=config.capture and not config.trace,
            bucket_mb=config.bucket_mb,
            pins=not config.compile,  # a compiler's processes would be kept on the same core
        ) as engine:
            return report(Training(config, prepared, engine, start).events(), log, quiet)
