"""Recording on one GPU with PyTorch: a CUDA graph, with a stream for each shard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import RunError

NUM_SLOTS = 64  # numbers on their way to the host at the same time; more than anybody has steps under way


class Reading:
    """Numbers that are on their way."""

    def __init__(self, event: torch.cuda.Event, slot: Tensor) -> None:
        self._event, self._slot = event, slot

    def read(self) -> list[float]:
        self._event.synchronize()
        return [float(number) for number in self._slot.tolist()]


class TorchRecorder:
    """Everything is asked for on one stream, and what goes beside it on one for each number."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._main, self._readings = torch.cuda.Stream(place), torch.cuda.Stream(place)
        self._sides: dict[int, torch.cuda.Stream] = {}
        self._used: set[int] = set()  # since the last fork
        self._start: torch.cuda.Event | None = None
        self._kept: list[Any] = []
        self._slots: list[Tensor] = []
        self._num_readings = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        with torch.cuda.device(self._place), torch.cuda.stream(self._main):
            yield

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._start, self._used = self._main.record_event(), set()
        try:
            yield
        finally:
            for number in self._used:
                self._main.wait_stream(self._sides[number])

    @contextmanager
    def beside(self, number: int) -> Iterator[None]:
        if number not in self._sides:
            self._sides[number] = torch.cuda.Stream(self._place)
        side = self._sides[number]
        assert self._start is not None, "within fork"
        if number not in self._used:
            self._used.add(number)
            side.wait_event(self._start)
        with torch.cuda.stream(side):
            yield

    def add_all(self, lefts: list[Tensor], rights: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_add(lefts, rights))

    def keep(self, what: Any) -> None:
        self._kept.append(what)  # a stream may use memory again that another has not read yet

    def record(self, work: Callable[[], Any], generators: Callable[[], list[Any]]) -> tuple[Callable[[], None], Any]:
        work()  # what is loaded, compiled or chosen on first use cannot be recorded
        self._main.synchronize()
        self._kept.clear()
        graph = torch.cuda.CUDAGraph()
        for generator in generators():
            graph.register_generator_state(generator)
        try:
            with torch.cuda.graph(graph, stream=self._main, capture_error_mode="thread_local"):
                result = work()
        except RunError:
            raise
        except Exception as problem:  # also from the end of a recording that broke off
            raise RunError((str(problem).splitlines() or [type(problem).__name__])[0]) from problem
        finally:
            self._kept.clear()
        return graph.replay, result

    def together(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack(numbers)

    def read_later(self, numbers: Tensor) -> Reading:
        at = self._num_readings % NUM_SLOTS
        self._num_readings += 1
        while len(self._slots) <= at:
            self._slots.append(torch.empty(0))
        if len(self._slots[at]) != len(numbers):
            self._slots[at] = torch.empty(len(numbers), dtype=numbers.dtype, pin_memory=True)
        kept = numbers.clone()  # what comes next on the main stream need not wait until they have arrived
        self._readings.wait_stream(self._main)
        with torch.cuda.stream(self._readings):
            self._slots[at].copy_(kept, non_blocking=True)
            kept.record_stream(self._readings)
        return Reading(self._readings.record_event(), self._slots[at])
