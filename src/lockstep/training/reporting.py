"""The events of a run, shown and recorded as they come."""

from collections.abc import Generator
from contextlib import closing

from lockstep.core.errors import RunError
from lockstep.report.console import Console
from lockstep.report.events import Event, Result, RunDone, RunStopped
from lockstep.report.runlog import RunLog
from lockstep.data.resident import lost_loaders


def report(events: Generator[Event, None, None], log: RunLog | None, quiet: bool) -> Result:
    """Shows and records the events as they come; gives the result, which is the last."""
    with Console() as console, closing(events):

        def tell(event: Event) -> None:
            if not quiet:
                console.show(event)
            if log is not None:
                try:
                    log.write(event)
                except RunError:
                    if not isinstance(event, RunStopped):  # why it stopped is said next, and matters more
                        raise

        try:
            with lost_loaders():
                for event in events:
                    tell(event)
        except KeyboardInterrupt:  # it came while an event was being told: let the run itself stop, in its own words
            tell(events.throw(KeyboardInterrupt()))
            next(events)
    assert isinstance(event, RunDone), "the last event of a run is its result"
    return event.result
