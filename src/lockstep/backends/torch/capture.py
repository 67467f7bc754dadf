"""CUDA graph capture of a step on one GPU with PyTorch, with streams for shards side by side."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import CaptureError, first_line

NUM_SLOTS = 64  # copies to the host at the same time; more than there are steps in flight
NUM_STREAMS = 16  # for shards side by side
SIDE_BY_SIDE_BYTES = 2 << 30  # shards that would take more memory side by side go a few at a time
NUM_LARGE = 2  # so many: a GPU is busy with two
GROUPS_SHARE = 1 / 8  # of a GPU's memory, for groups of shards: they have small kernels, which want more company


class HostCopy:
    """An asynchronous copy to the host."""

    weights = None  # a loss with weights of its own is not captured

    def __init__(self, event: torch.cuda.Event, slot: Tensor) -> None:
        self._event, self._slot = event, slot

    def result(self) -> list[float]:
        """The numbers; waits for them."""
        self._event.synchronize()
        return [float(number) for number in self._slot.tolist()]


@cache  # one for the process and rank: cuBLAS keeps a workspace for every stream
def _stream(device: torch.device, rank: int, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _fused_kernel(brackets: str, num_vectors: int) -> Any:
    """A kernel for a whole sum: one pass over memory instead of one for each addition."""
    names = ", ".join(f"T x{number}" for number in range(num_vectors))
    return torch.cuda.jiterator._create_jit_fn(f"template <typename T> T added({names}) {{ return {brackets}; }}")


class WarmUp:
    """What is learned from a step whose shards are computed one after the other."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes  # of the GPU's memory
        self._num_groups, self._bytes_of_group, self._max_shards = 0, 0, 1

    def add(self, reserved: int, num_shards: int) -> None:
        """So many shards were computed together, and so much memory was reserved; later ones use it again."""
        self._num_groups, self._bytes_of_group = self._num_groups + 1, max(self._bytes_of_group, reserved)
        self._max_shards = max(self._max_shards, num_shards)

    def num_streams(self) -> int:
        """Streams for all of them, or for as many (2, 4 or 8) as take no more memory than that; two at least."""
        number, share = NUM_STREAMS, int(GROUPS_SHARE * self._total_bytes)
        limit = SIDE_BY_SIDE_BYTES if self._max_shards == 1 else max(SIDE_BY_SIDE_BYTES, share)
        while number > NUM_LARGE and min(number, self._num_groups) * self._bytes_of_group > limit:
            number //= 2
        return number


class TorchGraphCapture:
    """Shards are launched on side streams, everything else on the main stream."""

    max_addends = 8  # of a jiterator kernel

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self._device, self._stream = device, partial(_stream, device, rank)
        self._main, self._copies = self._stream(-1), self._stream(-2)
        self._num_streams, self._is_serial = NUM_STREAMS, False
        self._warm_up: WarmUp | None = None  # while a step is warmed up
        self._used: set[int] = set()  # side streams, since the last fork
        self._start: torch.cuda.Event | None = None
        self._slots: dict[int, Tensor] = {}  # pinned memory
        self._num_copies = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream()
            self._main.wait_stream(caller)
            with torch.cuda.stream(self._main):
                yield
            caller.wait_stream(self._main)

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._start, self._used = self._main.record_event(), set()
        try:
            yield
        finally:
            for side in self._used:
                self._main.wait_stream(self._side(side))

    @contextmanager
    def side_stream(self, number: int, num_shards: int = 1) -> Iterator[None]:
        side = 0 if self._warm_up is not None else number % self._num_streams
        assert self._start is not None, "within fork"
        if side not in self._used:
            self._used.add(side)
            self._side(side).wait_event(self._start)
        before = torch.cuda.memory_reserved(self._device)
        with torch.cuda.stream(self._side(side)):
            yield
        if self._warm_up is not None:
            self._warm_up.add(torch.cuda.memory_reserved(self._device) - before, num_shards)

    def _side(self, number: int) -> torch.cuda.Stream:
        """The first is the main stream: what comes after the shards is in the memory that these have left."""
        return self._stream(number) if number else self._main

    def serialize_streams(self) -> bool:
        if self._is_serial:
            return False
        self._is_serial, self._num_streams = True, 1
        torch.cuda.empty_cache()
        return True

    def fused_add(self, brackets: str, vectors: list[Tensor]) -> Tensor:
        return _fused_kernel(brackets, len(vectors))(*vectors)

    def capture(
        self, run: Callable[[], Any], generators: Callable[[], list[Any]], warms_up: bool = True
    ) -> tuple[Callable[[], None], Any]:
        if warms_up:  # first use loads modules and compiles kernels, which cannot be captured
            torch.cuda.empty_cache()  # so that what a shard takes can be seen
            self._warm_up = WarmUp(torch.cuda.get_device_properties(self._device).total_memory)
            try:
                run()
            finally:
                found, self._warm_up = self._warm_up, None
            self._num_streams = 1 if self._is_serial else found.num_streams()
            self._main.synchronize()
            torch.cuda.empty_cache()  # the graph has memory of its own
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
