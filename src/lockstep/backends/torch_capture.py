"""CUDA graph capture of a step on one GPU with PyTorch, with a side stream for each shard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import CaptureError, first_line

NUM_SLOTS = 64  # copies to the host at the same time; more than there are steps in flight
NUM_STREAMS = 16


class HostCopy:
    """An asynchronous copy to the host."""

    def __init__(self, event: torch.cuda.Event, slot: Tensor) -> None:
        self._event, self._slot = event, slot

    def result(self) -> list[float]:
        """The numbers; waits for them."""
        self._event.synchronize()
        return [float(number) for number in self._slot.tolist()]


@cache  # one for the process: cuBLAS keeps a workspace for every stream
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _fused_kernel(brackets: str, num_vectors: int) -> Any:
    """A kernel for a whole sum: one pass over memory instead of one for each addition."""
    names = ", ".join(f"T x{number}" for number in range(num_vectors))
    return torch.cuda.jiterator._create_jit_fn(f"template <typename T> T added({names}) {{ return {brackets}; }}")


class TorchGraphCapture:
    """Shards are launched on side streams, everything else on the main stream."""

    max_addends = 8  # of a jiterator kernel

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._main, self._copies = _stream(device, -1), _stream(device, -2)
        self._num_streams = NUM_STREAMS
        self._used: set[int] = set()  # side streams, since the last fork
        self._start: torch.cuda.Event | None = None
        self._slots: dict[int, Tensor] = {}  # pinned memory
        self._num_copies = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._main):
            yield

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._start, self._used = self._main.record_event(), set()
        try:
            yield
        finally:
            for side in self._used:
                self._main.wait_stream(_stream(self._device, side))

    @contextmanager
    def side_stream(self, number: int) -> Iterator[None]:
        side = number % self._num_streams
        assert self._start is not None, "within fork"
        if side not in self._used:
            self._used.add(side)
            _stream(self._device, side).wait_event(self._start)
        with torch.cuda.stream(_stream(self._device, side)):
            yield

    def serialize_streams(self) -> bool:
        if self._num_streams == 1:
            return False
        self._num_streams = 1
        torch.cuda.empty_cache()
        return True

    def fused_add(self, brackets: str, vectors: list[Tensor]) -> Tensor:
        return _fused_kernel(brackets, len(vectors))(*vectors)

    def capture(self, run: Callable[[], Tensor], generators: Callable[[], list[Any]]) -> tuple[Callable[[], None], Any]:
        run()  # first use loads modules and compiles kernels, which cannot be captured
        self._main.synchronize()
        graph = torch.cuda.CUDAGraph()
        for generator in generators():
            graph.register_generator_state(generator)
        try:
            with torch.cuda.graph(graph, stream=self._main, capture_error_mode="thread_local"):
                result = run()
        except Exception as problem:
            first: BaseException = problem
            while first.__context__ is not None:  # later errors are about the aborted capture
                first = first.__context__
            raise CaptureError(first_line(first)) from problem
        return graph.replay, result

    def stack(self, numbers: list[Tensor]) -> Tensor:
        return torch.stack(numbers)

    def copy_to_host(self, numbers: Tensor) -> HostCopy:
        at = self._num_copies % NUM_SLOTS
        self._num_copies += 1
        if at not in self._slots or len(self._slots[at]) != len(numbers):
            self._slots[at] = torch.empty(len(numbers), dtype=numbers.dtype, pin_memory=True)
        kept = numbers.clone()  # so that the next replay on the main stream need not wait for the copy
        self._copies.wait_stream(self._main)
        with torch.cuda.stream(self._copies):
            self._slots[at].copy_(kept, non_blocking=True)
            kept.record_stream(self._copies)
        return HostCopy(self._copies.record_event(), self._slots[at])
