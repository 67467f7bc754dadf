"""What each rank did from when to when, while a run is traced.

`span` is put around the parts of a step; it does nothing unless the calling thread is traced. A span within another one
interrupts it, so no moment is counted twice. The time between two spans of a step is waiting.

A GPU works on after the host has launched its kernels. There a span also records an event on the device before and
after it (`Timed`): these are read when the run is over, and make a row of their own.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

MAX_SPANS = 100_000  # of a rank: the first thousand steps or so; a step is traced as a whole, or not at all
_LOCAL = threading.local()  # .trace: of the rank that this thread works for; .synchronize: waits for its device


class SpanName(StrEnum):
    """Everything that a trace can show, for all engines."""

    # what a rank does
    DATA = "data"  # gathers or copies the samples of a shard
    FORWARD = "forward"
    BACKWARD = "backward"
    COMPUTE = "forward and backward"  # what else its shards take: additions; the whole, where a CUDA graph is replayed
    EXCHANGE = "exchange"
    UPDATE = "update"
    WAIT = "wait"
    # what the host does: the loop of the process that the rank is in
    LOADING = "loading"  # waits for the next batch
    STEP = "step"
    CAPTURE = "capture"  # a step in which a CUDA graph was captured
    COMPARISON = "comparison of replicas"
    CHECKPOINT = "checkpoint"
    CALLBACK = "callback"
    EVALUATION = "evaluation"


ON_DEVICE = (SpanName.DATA, SpanName.FORWARD, SpanName.BACKWARD, SpanName.COMPUTE, SpanName.UPDATE)
WAIT = SpanName.WAIT
NONE = -1  # no shard, no stage, no step


class Span(NamedTuple):
    """What was done, in which step, from when to when (seconds of a clock that all processes of a machine share)."""

    name: str
    step: int
    start: float
    end: float
    shard: int = NONE
    stage: int = NONE

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Timed(Protocol):
    """What a device offers that works on its own: moments on its own clock."""

    def record(self) -> Any:
        """An event on the device, after what the calling thread has launched so far; None where there can be none."""

    def seconds(self, event: Any) -> float:
        """When the device came to it, on the host's clock (`time.monotonic`); waits for it."""


class OpenSpan(NamedTuple):
    """A span that has begun."""

    name: str
    shard: int
    stage: int
    event: Any  # that it began with on the device
    continues: bool = False  # the span around it, which has the same name


class Trace:
    """The spans of one rank. Only its own thread adds to it."""

    def __init__(self, timed: Timed | None = None) -> None:
        self.spans: list[Span] = []
        self.step = 0
        self._timed = timed
        self._on_device: list[tuple[OpenSpan, int, Any]] = []  # what began, its step, the event that it ended with
        self._open: list[OpenSpan] = []
        self._since = 0.0
        self.is_full = False  # the spans of this step, and of later ones, are not kept

    @property
    def is_timed(self) -> bool:
        """Whether the device's own clock is read."""
        return self._timed is not None

    @cached_property
    def exchange(self) -> "Trace":
        """The spans of the thread that exchanges while the rank computes."""
        return Trace()

    def start_step(self, step: int) -> None:
        """The spans that follow belong to this step."""
        self.step = self.exchange.step = step
        self.is_full = self.exchange.is_full = max(len(self.spans), len(self._on_device)) >= MAX_SPANS

    def start_span(self, name: str, shard: int = NONE, stage: int = NONE) -> None:
        """Starts a span; the one around it is interrupted, and says which shard and stage it is of, where it knows."""
        if self._open:
            around = self._open[-1]
            if around.name == name and shard in (around.shard, NONE):
                self._open.append(around._replace(event=None, continues=True))
                return
            shard, stage = (around.shard if shard == NONE else shard), (around.stage if stage == NONE else stage)
        self._close()
        event = self._timed.record() if self._timed and name in ON_DEVICE and not self.is_full else None
        self._open.append(OpenSpan(name, shard, stage, event))

    def end_span(self) -> None:
        """Ends the innermost span; the one around it continues."""
        if self._open[-1].continues:
            self._open.pop()
            return
        self._close()
        ended = self._open.pop()
        if self._timed and ended.event is not None and (end := self._timed.record()) is not None:
            self._on_device.append((ended, self.step, end))

    def _close(self) -> None:
        now = time.monotonic()
        if self._open and not self.is_full:
            name, shard, stage, *_ = self._open[-1]
            self.spans.append(Span(name, self.step, self._since, now, shard, stage))
        self._since = now

    def take_device_spans(self) -> list[Span]:
        """The spans of the device by its own clock, in the order in which they began; waits for the last of them."""
        if self._timed is None:
            return []
        seconds = self._timed.seconds
        found = [
            Span(began.name, step, seconds(began.event), seconds(end), began.shard, began.stage)
            for began, step, end in self._on_device
        ]
        self._on_device = []
        return sorted(found, key=lambda one: (one.start, -one.end))

    def take_spans(self) -> list[Span]:
        """The host's spans so far, which are forgotten here: what follows is not part of them."""
        taken, self.spans = self.spans, []
        return taken


@contextmanager
def traced(trace: Trace | None, synchronize: Callable[[], None] | None = None) -> Iterator[None]:
    """While it is entered, spans of this thread go to `trace`. `synchronize` waits for the rank's device."""
    before = getattr(_LOCAL, "trace", None), getattr(_LOCAL, "synchronize", None)
    _LOCAL.trace, _LOCAL.synchronize = trace, synchronize
    try:
        yield
    finally:
        _LOCAL.trace, _LOCAL.synchronize = before


@contextmanager
def span(name: SpanName, shard: int = NONE, stage: int = NONE, *, synchronizes: bool = False) -> Iterator[None]:
    """What the calling thread does meanwhile is called `name`.

    One that `synchronizes` ends when the device has done it; the others do so where only the host's clock is read.
    """
    trace: Trace | None = getattr(_LOCAL, "trace", None)
    if trace is None:
        yield
        return
    trace.start_span(name, shard, stage)
    try:
        yield
        if _LOCAL.synchronize is not None and (synchronizes or not trace.is_timed):
            _LOCAL.synchronize()
    finally:
        trace.end_span()


def with_waits(spans: Sequence[Span]) -> list[Span]:
    """The spans of a rank in order, and between those of one step the waiting."""
    found: list[Span] = []
    for one in sorted(spans, key=lambda span: span.start):
        if found and found[-1].step == one.step and one.start > found[-1].end:
            found.append(Span(WAIT, one.step, found[-1].end, one.start))
        found.append(one)
    return found


class HostTrace:
    """What the loop of a process does; spans may contain others."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_samples: dict[int, int] = {}  # of the batch of each step

    @contextmanager
    def span(self, name: SpanName, step: int = NONE) -> Iterator[None]:
        """What is done meanwhile is called `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, step, start)

    def add(self, name: SpanName, step: int, start: float) -> None:
        """Something that began at `start` ends now."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(Span(name, step, start, time.monotonic()))
