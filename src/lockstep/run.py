"""A run from end to end: everything is checked, then trained, shown and recorded."""

from contextlib import closing

from lockstep.config import RunConfig
from lockstep.epochs import train
from lockstep.prepare import prepare
from lockstep.report.console import Console, fetch_progress
from lockstep.report.events import Event, Result, RunDone
from lockstep.report.runlog import RunLog
from lockstep.samples import lost_loaders
from lockstep.task import Given


def run(config: RunConfig, given: Given | None = None, quiet: bool = False) -> Result:
    """The result of a run, shown on standard error unless `quiet`, and recorded if `config.out` names a folder."""
    log = None if config.out is None else RunLog(config.out)
    with fetch_progress() as progress:
        prepared = prepare(config, given, progress)
    with Console() as console, closing(train(config, prepared)) as events:

        def tell(event: Event) -> None:
            if log is not None:
                log.write(event)
            if not quiet:
                console.show(event)

        try:
            with lost_loaders():
                for event in events:
                    tell(event)
        except KeyboardInterrupt:  # it came while an event was being told: let the run itself stop, in its own words
            tell(events.throw(KeyboardInterrupt()))
            next(events)
    assert isinstance(event, RunDone), "the last event of a run is its result"
    return event.result
