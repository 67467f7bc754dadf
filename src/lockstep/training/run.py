"""A run from end to end: everything is checked, then trained, shown and recorded."""

from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import replace

from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.interrupts import Interrupts
from lockstep.core.torchrun_env import torchrun_env
from lockstep.data.batch import loader_errors
from lockstep.report.console import Console, fetch_progress
from lockstep.report.events import Event, Result, RunDone, RunStopped
from lockstep.report.runlog import RunLog
from lockstep.training.loop import ResumePoint, Training
from lockstep.training.resume import find_resume_point
from lockstep.training.setup import inprocess_engine, prepare
from lockstep.training.task import UserObjects


def run(config: RunConfig, objects: UserObjects | None = None, quiet: bool = False, resume: bool = False) -> Result:
    """The result of a run, shown on standard error unless `quiet`, and recorded if `config.out` names a folder."""
    if resume and config.out is None:
        raise ConfigError("There is no run to resume. Name its folder: --out runs/NAME (out=...).")
    if env := torchrun_env():
        from lockstep.training.torchrun import train_under_torchrun  # loads its framework

        return train_under_torchrun(replace(config, engine="processes"), env, objects, quiet, resume)
    log = None if config.out is None else RunLog(config.out, is_resumed=resume)
    with fetch_progress() as progress:
        prepared = prepare(config, objects, progress)
    with ExitStack() as undo:
        start = ResumePoint()
        if log is not None:
            log.claim()
            undo.callback(log.close)
            start = find_resume_point(config, prepared, resume)
        if config.engine == "processes":
            from lockstep.training.elastic import train_in_processes  # loads its framework

            return train_in_processes(config, prepared, start, log, quiet)
        interrupts = undo.enter_context(Interrupts(notify=not quiet))
        start = replace(start, is_stopping=lambda: interrupts.requested)
        with inprocess_engine(config, prepared) as engine:
            return report(Training(config, prepared, engine, start).events(), log, quiet)


def report(events: Generator[Event, None, None], log: RunLog | None, quiet: bool) -> Result:
    """Shows and records the events as they come; gives the result, which is the last."""
    with Console() as console, closing(events):

        def show_and_record(event: Event) -> None:
            if not quiet:
                console.show(event)
            if log is not None:
                try:
                    log.write(event)
                except RunError:
                    if not isinstance(event, RunStopped):  # why it stopped is said next, and matters more
                        raise

        try:
            with loader_errors():
                for event in events:
                    show_and_record(event)
        except KeyboardInterrupt:  # it came between two events: let the run itself stop, in its own words
            show_and_record(events.throw(KeyboardInterrupt()))
            next(events)
    assert isinstance(event, RunDone), "the last event of a run is its result"
    return event.result
