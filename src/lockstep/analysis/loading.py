"""Samples that are loaded one by one: how fast, measured with the run's own loader, and how long a step waits for them.

Worker processes load whole shards, a few of them ahead of the step that needs them. So a step waits only for what could
not be loaded while the one before was computed; without workers, for all of it. Where loading keeps cores busy that
CPU devices compute with, neither can be done faster than all cores together are.
"""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lockstep.backends import Backend, Tensor
from lockstep.backends.hardware import cpu
from lockstep.core.device import Device
from lockstep.core.layout import Array
from lockstep.data.batch import Batch, LoadingSource

FEW = 64  # samples that passes are measured with, over and over
SHARD_SECONDS = 0.1  # that a shard may take to load, of those that are measured
ROUNDS, MIN_ROUNDS = 12, 3  # shards that each worker loads


class Loading(NamedTuple):
    """What loading takes. Nothing: samples are in memory."""

    seconds: float = 0.0  # of a sample, by one worker
    busy: float = 0.0  # of these, that a core works
    handing_over: float = 0.0  # of a shard that a worker has loaded, to the process that needs it
    num_workers: int = 0  # of a run; with none, the process that needs samples loads them itself
    ahead: int = 0  # shards that a worker loads before somebody asks for them
    num_cores: int = 1  # that workers, and CPU devices, share

    def sentence(self) -> str:
        """What to do where it is too slow."""
        if not self.num_workers:
            return "Loading: samples are loaded between steps. Worker processes would load them ahead: --workers."
        rate, they = self.num_workers / self.seconds, "worker loads" if self.num_workers == 1 else "workers load"
        return (
            f"Loading: {self.num_workers} {they} about {rate:,.0f} samples a second, however many devices wait for "
            f"them. More of them may help (--workers), or samples that take less to load."
        )

    def waits(self, shard_sizes: list[int], num_processes: int, step: float) -> float:
        """Seconds that a process waits for its shards, while a step without them takes `step`."""
        if not self.num_workers:
            return self.seconds * sum(shard_sizes)
        workers = -(-self.num_workers // num_processes)
        each = self.seconds * sum(shard_sizes) / max(1, len(shard_sizes)) / workers  # time between two shards
        loaded = min(step, workers * self.ahead * each)  # seconds of loading that are over when the step is
        return max(self.handing_over * len(shard_sizes), each * len(shard_sizes) - loaded)


class HostMemory:
    """The CPU's memory, for samples that are only loaded: no GPU is touched."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.devices = backend, [Device("cpu:0")]
        self.num_ranks, self.local_ranks = 1, range(1)

    def copy_to_devices(self, array: Array) -> list[Tensor]:
        """The array, to read from."""
        return [self.backend.from_numpy(array, self.devices[0])]


class Remembered:
    """A map-style data set whose samples are loaded once."""

    def __init__(self, data: Any) -> None:
        self._data, self._samples = data, dict[int, Any]()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> Any:
        if number not in self._samples:
            self._samples[number] = self._data[number]
        return self._samples[number]


def remembered(data: Any) -> Any:
    """Data whose training samples, which are not in memory, are loaded once."""
    return (Remembered(data[0]), data[1]) if isinstance(data, (tuple, list)) else Remembered(data)


def measure_loading(
    alone: LoadingSource, workers: LoadingSource, order: Array, max_shard: int, seconds: float
) -> Loading:
    """Loads some samples, without workers and with those of the run, for about so many seconds.

    Rates are measured between the end of a first round of shards, one for each worker, and the end of the last.
    """
    wall, busy, size = _without_workers(alone, order, max_shard)
    num_workers, ahead = workers.num_workers, workers.num_ahead
    if not num_workers:
        return Loading(wall, busy)
    rounds = max(MIN_ROUNDS, min(ROUNDS, int(seconds / max(wall * size, 1e-6))))
    shards = _shards(workers, order, size, (rounds + ahead) * num_workers)
    _take(shards, num_workers)
    began = time.perf_counter()
    _take(shards, (rounds - 1) * num_workers)
    passed = time.perf_counter() - began
    time.sleep(min(1.0, 2 * ahead * passed / (rounds - 1)))  # until all that are loaded ahead are there
    began = time.perf_counter()
    _take(shards, (ahead - 1) * num_workers)
    handing_over = (time.perf_counter() - began) / ((ahead - 1) * num_workers)
    each = max(wall, passed / (rounds - 1) / size)  # some may have been there: no worker is faster than this process
    return Loading(each, busy, handing_over, num_workers, ahead, cpu().num_cores)


def _without_workers(source: LoadingSource, order: Array, max_shard: int) -> tuple[float, float, int]:
    """Seconds of a sample, those of them that a core works, and the size of shards that do not take too long."""
    _take(_shards(source, order, 1, 1), 1)  # opens files
    size, wall, busy = 1, 0.0, 0.0
    while True:
        shards, began, began_busy = _shards(source, order, size, 1), time.perf_counter(), time.process_time()
        _take(shards, 1)
        wall, busy = (time.perf_counter() - began) / size, (time.process_time() - began_busy) / size
        if size >= max_shard or 4 * size * wall > SHARD_SECONDS:
            return wall, min(wall, busy), size
        size = min(4 * size, max_shard)


def _shards(source: LoadingSource, order: Array, size: int, number: int) -> Iterator[Batch]:
    """So many batches of one shard each; samples may be there more than once."""
    return iter(source.batches(np.resize(order, size * number), size, lambda num_samples: [range(num_samples)], 0))


def _take(shards: Iterator[Batch], number: int) -> None:
    for _ in range(number):
        next(shards)
