"""Where the events of a run go, besides the terminal: its folder, and loggers."""

from collections.abc import Sequence
from typing import Protocol

from lockstep.report.events import Event


class Sink(Protocol):
    """Takes the events of a run."""

    def write(self, event: Event) -> None:
        """Records one event."""


class Sinks:
    """Several of them, as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def write(self, event: Event) -> None:
        """Gives the event to each."""
        for sink in self._sinks:
            sink.write(event)
