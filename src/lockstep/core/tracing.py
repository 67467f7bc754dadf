"""Where the time of a step goes: what each rank did from when to when, while a run is traced.

`span` is put around the parts of a step; it does nothing unless the calling thread is traced. A span within another one
interrupts it, so no moment is counted twice. The time between two spans of a step is waiting.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

MAX_SPANS = 100_000  # of a rank: the first thousand steps or so
WAIT = "wait"
SHARED = ("data", "forward", "backward", "forward and backward")  # work that is divided among k devices
REPEATED = "update"  # work that every device does for itself
_LOCAL = threading.local()  # .trace: of the rank that this thread works for


class Span(NamedTuple):
    """What a rank did, in which step, from when to when (seconds of a clock that all processes share)."""

    name: str
    step: int
    start: float
    end: float


class Trace:
    """The spans of one rank. Only its own thread adds to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.step = 0
        self._open: list[str] = []
        self._since = 0.0

    @cached_property
    def exchange(self) -> "Trace":
        """The spans of the thread that exchanges while the rank computes."""
        return Trace()

    def start_step(self, step: int) -> None:
        """The spans that follow belong to this step."""
        self.step = self.exchange.step = step

    def start_span(self, name: str) -> None:
        """Starts a span; the one around it is interrupted."""
        self._close()
        self._open.append(name)

    def end_span(self) -> None:
        """Ends the innermost span; the one around it continues."""
        self._close()
        self._open.pop()

    def _close(self) -> None:
        now = time.monotonic()
        if self._open and len(self.spans) < MAX_SPANS:
            self.spans.append(Span(self._open[-1], self.step, self._since, now))
        self._since = now


@contextmanager
def traced(trace: Trace | None, synchronize: Callable[[], None] | None = None) -> Iterator[None]:
    """While it is entered, spans of this thread go to `trace`. `synchronize` waits for the rank's device."""
    _LOCAL.trace, _LOCAL.synchronize = trace, synchronize
    try:
        yield
    finally:
        _LOCAL.trace = None


@contextmanager
def span(name: str) -> Iterator[None]:
    """What the calling thread does meanwhile is called `name`."""
    trace: Trace | None = getattr(_LOCAL, "trace", None)
    if trace is None:
        yield
        return
    trace.start_span(name)
    try:
        yield
        if _LOCAL.synchronize is not None:
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


def chrome_trace(
    ranks: Sequence[Sequence[Span]], exchanges: Sequence[Sequence[Span]], devices: Sequence[str]
) -> list[dict[str, Any]]:
    """The spans of all ranks as Chrome and Perfetto read them: a row for each rank, times in microseconds.

    An exchange that overlaps with a rank's work is the row below.
    """
    rows: list[tuple[str, Sequence[Span]]] = []
    for rank, device in enumerate(devices):
        rows.append((f"rank {rank} ({device})", with_waits(ranks[rank])))
        rows.append((f"rank {rank}, overlapped exchange", exchanges[rank]))
    rows = [(name, spans) for name, spans in rows if spans]
    start = min((one.start for _, spans in rows for one in spans), default=0.0)
    names: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
        for row, (name, _) in enumerate(rows)
    ]
    return names + [
        {"name": one.name, "ph": "X", "pid": 0, "tid": row, "args": {"step": one.step}}
        | {"ts": round(1e6 * (one.start - start), 1), "dur": round(1e6 * (one.end - one.start), 1)}
        for row, (_, spans) in enumerate(rows)
        for one in spans
    ]


class Lost(NamedTuple):
    """A step in milliseconds, averaged over steps and ranks: what it takes, what it would take, and the difference."""

    step: float
    perfect: float  # if k devices were k times as fast as one
    to: dict[str, float]  # name of the spans -> milliseconds

    def sentence(self, num_ranks: int) -> str:
        """The summary that a traced run ends with."""
        parts = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.to.items()) or "none"
        return f"a step took {self.step:.2f} ms; ideal {num_ranks}x scaling: {self.perfect:.2f} ms; overhead: {parts}"


def lost_time(ranks: Sequence[Sequence[Span]]) -> Lost:
    """What a perfect k-fold speed-up was lost to. The first step is left out: kernels are loaded in it.

    >>> one = [Span("forward", 2, 0.0, 0.004), Span("update", 2, 0.005, 0.006)]
    >>> lost_time([one, [Span("forward", 2, 0.0, 0.005), Span("update", 2, 0.005, 0.006)]])
    Lost(step=6.0, perfect=5.0, to={'update': 0.5, 'wait': 0.5})
    """
    num_ranks, steps = len(ranks), sorted({one.step for spans in ranks for one in spans})
    counted = set(steps[1:] or steps)
    per_step: dict[str, float] = {}
    for one in (one for spans in ranks for one in with_waits(spans) if one.step in counted):
        ms = 1e3 * (one.end - one.start) / (num_ranks * len(counted))
        per_step[one.name] = per_step.get(one.name, 0.0) + ms
    repeated = per_step.get(REPEATED, 0.0)
    perfect = sum(per_step.get(name, 0.0) for name in SHARED) + repeated / num_ranks
    to = {REPEATED: repeated * (1 - 1 / num_ranks)}
    to |= {name: ms for name, ms in per_step.items() if name not in (*SHARED, REPEATED)}
    lost = {name: round(ms, 6) for name, ms in to.items() if ms > 0}
    return Lost(round(sum(per_step.values()), 6), round(perfect, 6), lost)
