"""Recording on one GPU with PyTorch: a CUDA graph, with a stream for each shard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import NotRecorded

NUM_SLOTS = 64  # numbers on their way to the host at the same time; more than anybody has steps under way


class Reading:
    """Numbers that are on their way."""

    def __init__(self, event: torch.cuda.Event, slot: Tensor) -> None:
        self._event, self._slot = event, slot

    def read(self) -> list[float]:
        self._event.synchronize()
        return [float(number) for number in self._slot.tolist()]


@cache  # for the whole process: every stream gets memory for matrix products that it keeps
def _stream(place: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(place)


@cache
def _added(brackets: str, num_vectors: int) -> Any:
    """A kernel that adds up vectors in these brackets: in one pass over memory instead of one for each addition."""
    names = ", ".join(f"T x{number}" for number in range(num_vectors))
    return torch.cuda.jiterator._create_jit_fn(f"template <typename T> T added({names}) {{ return {brackets}; }}")


class TorchRecorder:
    """Everything is asked for on one stream, and what goes beside it on one for each number."""

    most_at_once = 8  # inputs of a kernel that is made from source

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._main, self._readings = _stream(place, -1), _stream(place, -2)
        self._width = 16  # streams for what goes beside the rest
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
            for side in self._used:
                self._main.wait_stream(_stream(self._place, side))

    @contextmanager
    def beside(self, number: int) -> Iterator[None]:
        side = number % self._width
        assert self._start is not None, "within fork"
        if side not in self._used:
            self._used.add(side)
            _stream(self._place, side).wait_event(self._start)
        with torch.cuda.stream(_stream(self._place, side)):
            yield

    def narrow(self) -> bool:
        if self._width == 1:
            return False
        self._width = 1
        torch.cuda.empty_cache()
        return True

    def add_up(self, brackets: str, vectors: list[Tensor]) -> Tensor:
        total: Tensor = _added(brackets, len(vectors))(*vectors)
        return total

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
        except Exception as problem:
            first: BaseException = problem
            while first.__context__ is not None:  # what came after it is about a recording that broke off
                first = first.__context__
            raise NotRecorded((str(first).splitlines() or [type(first).__name__])[0].rstrip(".")) from problem
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
