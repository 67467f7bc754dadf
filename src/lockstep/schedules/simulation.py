"""Threads that work, wait and share hardware, event by event, in the order of time: what `clock.py` runs ranks on."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """What a rank does, or waits for, from when to when."""

    rank: int
    kind: str
    shard: int
    stage: int
    start: float
    end: float


class Work(NamedTuple):
    """To be done, in seconds of a rank that is alone on its hardware."""

    kind: str
    seconds: float
    shard: int = 0
    stage: int = 0


class Until(NamedTuple):
    """To be waited for: what others make happen, by its name."""

    kind: str
    events: tuple[Hashable, ...]


class Delay(NamedTuple):
    """Time that passes, whoever else works."""

    kind: str
    seconds: float


Todo = Iterator[Work | Until | Delay]


class Thread(NamedTuple):
    """Goes through what a rank has to do. Those with the same hardware slow each other down."""

    rank: int
    todo: Todo
    hardware: Hashable
    is_recorded: bool = True


class _Active:
    """Work that is under way."""

    def __init__(self, thread: Thread, work: Work, start: float) -> None:
        self.thread, self.work, self.start = thread, work, start
        self.left, self.since, self.version = work.seconds, start, 0


class Simulation:
    """Events in the order of time. A thread runs until it has to work, or to wait."""

    def __init__(self, slowdown: Callable[[str, int], float]) -> None:
        """`slowdown(kind, n)`: how many times as long work takes while n threads work on the same hardware."""
        self.now, self.spans = 0.0, list[Span]()
        self._slowdown, self._count = slowdown, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._happened: dict[Hashable, float] = {}
        self._waiting: dict[Hashable, list[Callable[[], None]]] = defaultdict(list)
        self._counts: dict[Hashable, int] = defaultdict(int)
        self._active: dict[Hashable, list[_Active]] = defaultdict(list)  # by hardware

    def run(self, threads: list[Thread]) -> None:
        """Runs all threads to their ends."""
        for thread in threads:
            self._go_on(thread)
        while self._queue:
            self.now, _, call = heapq.heappop(self._queue)
            call()

    def happens(self, event: Hashable, at: float) -> None:
        """Something that others wait for happens, or will at that time."""
        self._happened[event] = at
        for call in self._waiting.pop(event, ()):
            self._at(at, call)

    def arrives(self, event: Hashable, num_threads: int, latency: float) -> None:
        """One of so many threads is there; with the last, the event happens."""
        self._counts[event] += 1
        if self._counts[event] == num_threads:
            self.happens(event, self.now + latency)

    def _at(self, time: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, call))

    def _go_on(self, thread: Thread) -> None:
        """Lets a thread run until it has to work or to wait."""
        for todo in thread.todo:
            match todo:
                case Work():
                    if todo.seconds > 0:
                        self._start(thread, todo)
                        return
                case Delay(kind, seconds):
                    if seconds > 0:
                        if thread.is_recorded:
                            self._record(thread.rank, kind, self.now, self.now + seconds)
                        self._at(self.now + seconds, lambda: self._go_on(thread))
                        return
                case Until(kind, events):
                    if self._waits(thread, kind, events, self.now):
                        return

    def _waits(self, thread: Thread, kind: str, events: tuple[Hashable, ...], since: float) -> bool:
        """Whether a thread has to wait for these events; it goes on when they have happened."""
        for event in events:
            if event not in self._happened:
                self._waiting[event].append(lambda: self._go_on_after(thread, kind, events, since))
                return True
        latest = max((self._happened[event] for event in events), default=0.0)
        if latest <= self.now:
            return False
        self._at(latest, lambda: self._go_on_after(thread, kind, events, since))
        return True

    def _go_on_after(self, thread: Thread, kind: str, events: tuple[Hashable, ...], since: float) -> None:
        if not self._waits(thread, kind, events, since):
            if thread.is_recorded:
                self._record(thread.rank, kind, since, self.now)
            self._go_on(thread)

    def _start(self, thread: Thread, work: Work) -> None:
        active = self._active[thread.hardware]
        active.append(_Active(thread, work, self.now))
        self._share(thread.hardware, len(active) - 1)

    def _share(self, hardware: Hashable, num_before: int) -> None:
        """The number of those who work on this hardware has changed: so has the time that each still needs."""
        active = self._active[hardware]
        for one in active:
            if one.since < self.now:
                one.left -= (self.now - one.since) / self._slowdown(one.work.kind, num_before)
            one.since, one.version = self.now, one.version + 1
            ends = self.now + max(0.0, one.left) * self._slowdown(one.work.kind, len(active))
            self._at(ends, lambda one=one, version=one.version: self._finish(hardware, one, version))  # type: ignore[misc]

    def _finish(self, hardware: Hashable, one: _Active, version: int) -> None:
        if version != one.version:  # it was slowed down, or has become faster
            return
        self._active[hardware].remove(one)
        one.version += 1
        self._share(hardware, len(self._active[hardware]) + 1)
        if one.thread.is_recorded:
            self._record(one.thread.rank, one.work.kind, one.start, self.now, one.work.shard, one.work.stage)
        self._go_on(one.thread)

    def _record(self, rank: int, kind: str, start: float, end: float, shard: int = 0, stage: int = 0) -> None:
        if end > start:
            self.spans.append(Span(rank, kind, shard, stage, start, end))
