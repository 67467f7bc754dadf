"""A run from start to end: checked, trained, shown and recorded."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError, RunError
from lockstep.core.interrupts import Interrupts
from lockstep.core.torchrun_env import torchrun_env
from lockstep.data.batch import loader_errors
from lockstep.report.events import Event, Result, RunDone, RunStopped
from lockstep.report.notebook import run_display
from lockstep.report.sinks import Sink
from lockstep.training.auto_split import with_split
from lockstep.training.loop import Training
from lockstep.training.resume import opened_run
from lockstep.training.setup import inprocess_engine, with_engine
from lockstep.training.task import UserObjects


def run(config: RunConfig, objects: UserObjects | None = None, quiet: bool = False, resume: bool = False) -> Result:
    """The result of a run, shown on standard error unless `quiet`, and recorded if `config.out` names a folder."""
    if resume and config.out is None:
        raise ConfigError("There is no run to resume. Name its folder: --out runs/NAME (out=...).")
    if env := torchrun_env():
        from lockstep.training.torchrun import TorchrunRank  # loads its framework

        return TorchrunRank(replace(config, engine="processes"), env, quiet).train(objects, resume)
    config, objects, notes = with_split(with_engine(config), objects)
    with opened_run(config, objects, resume) as (prepared, log, start):
        start = replace(start, notes=[*notes, *start.notes])
        if config.engine == "processes":
            from lockstep.training.elastic import train_in_processes  # loads its framework

            return train_in_processes(config, prepared, start, log, quiet)
        with Interrupts(notify=not quiet) as interrupts, inprocess_engine(config, prepared) as engine:
            start = replace(start, is_stopping=lambda: interrupts.requested)
            return report(Training(config, prepared, engine, start).events(), log, quiet)


def report(events: Generator[Event, None, None], log: Sink | None, quiet: bool) -> Result:
    """Shows and records each event; returns the result, which is the last."""
    with run_display() as console, closing(events):

        def show_and_record(event: Event) -> None:
            if not quiet:
                console.show(event)
            if log is not None:
                try:
                    log.write(event)
                except RunError:
                    if not isinstance(event, RunStopped):  # the error that stopped the run matters more
                        raise

        try:
            with loader_errors():
                for event in events:
                    show_and_record(event)
        except KeyboardInterrupt:  # between two events: the run itself has to stop
            show_and_record(events.throw(KeyboardInterrupt()))
            for event in events:
                show_and_record(event)
    assert isinstance(event, RunDone)
    return event.result
