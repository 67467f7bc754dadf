"""Samples that are loaded one by one: a map-style dataset, read by worker processes ahead of the step that needs them.

A worker loads whole shards. The order of samples is the run's, and random numbers that `__getitem__` draws (from
Python, numpy or PyTorch) are keyed by (seed, epoch, sample): neither the devices nor the workers change a bit.
"""

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from lockstep.backends.torch import torch_device
from lockstep.core.child_process import die_with
from lockstep.core.errors import DataError, RunError
from lockstep.core.layout import Array
from lockstep.core.random import AUGMENTATION, COLLATE
from lockstep.core.source_lines import at, user_source_line
from lockstep.data.batch import Batch, DeviceMemory, Split, StaticBatch
from lockstep.data.dataset import FORMS, leaves_of, map_leaves, pair_of
from lockstep.data.seeded import seeded
from lockstep.data.static_input import LoadShard, StaticInput, static_batch
from lockstep.partition.grid import Grid
from lockstep.partition.ranks import split_over_ranks

Collate = Callable[[list[Any]], Any]
PREFETCH = 4  # shards that a worker loads ahead


class ShardRequest(NamedTuple):
    """Samples to load, which are a shard."""

    epoch: int
    samples: list[int]


class LoadFailure(NamedTuple):
    """Why a sample could not be loaded; an exception would lose the user's line on its way between processes."""

    sample: int
    reason: str
    source_line: str


def check_map_style(data: Any, what: str) -> None:
    """Refuses everything but a map-style dataset of pairs."""
    if isinstance(data, IterableDataset):
        raise DataError(
            f"The {what} data is iterable-style: its samples come in an order of their own, so they cannot be shuffled "
            f"by (seed, epoch) or resumed after a crash. Use a map-style dataset, with __len__ and __getitem__."
        )
    if isinstance(data, DataLoader):
        raise DataError(
            f"The {what} data is a DataLoader, which makes batches of its own. Give its data set (loader.dataset), and "
            f"batch_size, workers, collate_fn or sampler to lockstep.train; or give the batches to a lockstep.Trainer."
        )
    for method in ("__len__", "__getitem__"):
        if not hasattr(data, method):
            raise DataError(f"The {what} data is a {type(data).__name__} without {method}. {FORMS}")
    if len(data) < 1:
        raise DataError(f"The {what} data is empty: its length is {len(data)}. Give one sample at least.")


def check_keyed(shards: "ShardDataset", what: str) -> None:
    """Refuses a dataset with a random number generator of its own: samples would depend on who loads them."""
    twice = []
    for _ in range(2):
        shard = shards[ShardRequest(0, [0])]
        if isinstance(shard, LoadFailure):  # the run reports it
            return
        twice.append(leaves_of(shard))
    if not all(torch.equal(one, other) for one, other in zip(*twice, strict=True) if isinstance(one, torch.Tensor)):
        raise DataError(
            f"Sample 0 of the {what} data is another each time: it draws from a generator of its own. Draw from "
            f"random, numpy.random or torch, which are keyed by (seed, epoch, sample)."
        )


def as_arrays(data: Any) -> Any:
    """The (X, y) of a dataset that only holds tensors, which need not be loaded one by one; else None."""
    if type(data) is not TensorDataset or len(data.tensors) != 2:
        return None
    return None if data.tensors[0].dtype == torch.uint8 else data.tensors  # bytes of a dataset are not divided by 255


class Loader:
    """Batches of a map-style dataset."""

    in_memory = False

    def __init__(
        self, memory: DeviceMemory, shards: "ShardDataset", what: str, num_workers: int, grid: Grid | None = None
    ) -> None:
        self._memory, self._what, self._shards = memory, what, shards
        self._grid = grid or Grid(data=memory.num_ranks)
        self.num_samples, self.num_workers, self.num_ahead = shards.num_samples, num_workers, PREFETCH
        self._requests: list[ShardRequest] = []  # of an epoch, in the order in which they are needed
        self._static: dict[tuple[int, int], StaticInput] = {}  # rank, size of the batch ->
        self._loader = DataLoader(
            self._shards,
            sampler=self._requests,
            batch_size=None,  # a shard is one item
            num_workers=num_workers,
            prefetch_factor=PREFETCH if num_workers else None,
            persistent_workers=num_workers > 0,
            pin_memory=memory.devices[0].kind == "cuda",
            generator=torch.Generator(),  # not the process's own: it draws a seed for the workers
            worker_init_fn=partial(_start_worker, os.getpid()),
        )

    def batches(self, order: Array, batch_size: int, split: Split, epoch: int) -> Iterator[Batch]:
        numbers = order.tolist()
        parts = [numbers[first : first + batch_size] for first in range(0, len(numbers), batch_size)]
        own = [self._own(split(len(part))) for part in parts]
        self._requests[:] = [
            ShardRequest(epoch, part[shard.start : shard.stop])
            for part, shards in zip(parts, own, strict=True)
            for shard in shards
        ]
        with warnings.catch_warnings():  # of forking with threads: those of the ranks are idle now
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            try:
                loaded = iter(self._loader)
            except RuntimeError as problem:  # a worker is dead; the others end when nothing refers to them any more
                traceback.clear_frames(problem.__traceback__)
                raise
        for part, ranges in zip(parts, own, strict=True):
            shards = {shard.start: self._next(loaded) for shard in ranges}
            load = partial(self._load, ShardRequest(epoch, part), shards)
            static = partial(self._static_batch, len(part), load)
            check = partial(self._check_again, ShardRequest(epoch, part), load)
            yield Batch(len(part), partial(self._fetch, load), static, check)

    def _load(self, batch: ShardRequest, shards: dict[int, Any], start: int, stop: int) -> Any:
        """The samples of a shard, in the CPU's memory."""
        if start not in shards:  # it was another process's before shards were moved
            request = ShardRequest(batch.epoch, batch.samples[start:stop])
            shards[start] = self._checked(self._shards[request])
        return shards[start]

    def _check_again(self, batch: ShardRequest, load: LoadShard, start: int, stop: int) -> None:
        """Loads samples once more, in this process, and compares them with what the model gets.

        Backwards, so that a state is noticed; but a collate_fn of the user's may look at a sample's neighbours.
        """
        step = -1 if self._shards.stacks else 1
        again = self._checked(self._shards[ShardRequest(batch.epoch, batch.samples[start:stop][::step])])
        for one, other in zip(leaves_of(load(start, stop)), leaves_of(again), strict=True):
            if not isinstance(one, torch.Tensor) or not one.ndim or len(one) != stop - start:
                continue
            loaded_again = torch.as_tensor(other)
            loaded_again = loaded_again.flip(0) if step < 0 else loaded_again
            differs = [not torch.equal(a, b) for a, b in zip(one, loaded_again, strict=True)]
            if any(differs):
                sample = batch.samples[start + differs.index(True)]
                raise RunError(
                    f"Sample {sample} of the {self._what} data is another each time it is loaded: the data set draws "
                    f"from a generator of its own, or keeps a state. Draw from random, numpy.random or torch, which "
                    f"are keyed by (seed, epoch, sample)."
                )

    def _static_batch(self, size: int, load: LoadShard, rank: int) -> StaticBatch:
        if (rank, size) not in self._static:
            self._static[rank, size] = StaticInput(torch_device(self._memory.devices[rank]))
        return static_batch(self._static[rank, size], load)

    def _fetch(self, load: LoadShard, rank: int, start: int, stop: int) -> tuple[Any, Any]:
        device = torch_device(self._memory.devices[rank])

        def put(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor  # like a string: carried along
            dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype  # as with arrays
            return (tensor[: stop - start] if tensor.ndim else tensor).to(device, dtype, copy=True)

        loaded = load(start, stop)
        if isinstance(loaded, dict):
            return (X := map_leaves(loaded, put)), X
        X, y = map_leaves(loaded, put)
        return X, y

    def _own(self, shards: list[range]) -> list[range]:
        """The shards that ranks of this process get, unless they are moved."""
        ranges = split_over_ranks(len(shards), self._grid.data)
        places = [self._grid.at(rank) for rank in self._memory.local_ranks]
        ends = (0, self._grid.network - 1)  # stages in between need no samples
        copies = sorted({at.data for at in places if at.network in ends})
        return [shards[number] for copy in copies for number in ranges[copy]]

    def _next(self, loaded: Iterator[Any]) -> Any:
        try:
            return self._checked(next(loaded))
        except (EOFError, ConnectionError) as problem:  # the worker ended while it sent something
            hint = "Use fewer loader workers (--workers), or none to see more (--workers 0)"
            raise RunError(f"The {self._what} data cannot be loaded: a loader worker has died. {hint}.") from problem

    def _checked(self, shard: Any) -> Any:
        if isinstance(shard, LoadFailure):
            why = f"{shard.reason}{at(shard.source_line)}"
            raise RunError(f"Sample {shard.sample} of the {self._what} data cannot be loaded: {why}")
        return shard

    def close(self) -> None:
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            feeders = [queue._thread for queue in iterator._index_queues]
            iterator._shutdown_workers()
            for thread in feeders:
                if thread is not None:  # it ends by itself, soon
                    thread.join(timeout=5)


def _start_worker(parent: int, worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler sends it to all: the run saves, and ends its workers
    die_with(parent)


class ShardDataset:
    """A dataset of shards, as `DataLoader` sees it."""

    def __init__(self, data: Any, seed: int, collate_fn: Collate | None = None) -> None:
        self._data, self._seed, self._collate = data, seed, collate_fn or default_collate
        self.num_samples = len(data)

    @property
    def stacks(self) -> bool:
        """Whether a shard is its samples, one beside the other."""
        return self._collate is default_collate

    def __getitem__(self, request: ShardRequest) -> Any:
        samples = []
        for number in request.samples:
            with seeded(self._seed, request.epoch, number, AUGMENTATION):
                try:
                    samples.append(_inputs_and_target(self._data[number], self.stacks))
                except (Exception, SystemExit) as problem:
                    return LoadFailure(number, _sentence(problem), user_source_line(problem))
        try:
            with seeded(self._seed, request.epoch, request.samples[0], COLLATE):
                return _plain(self._collate(samples))
        except Exception as problem:
            shapes = sorted({str([tuple(np.shape(leaf)) for leaf in leaves_of(sample)]) for sample in samples})
            reason = f"shapes {' and '.join(shapes[:2])}" if len(shapes) > 1 else _sentence(problem)
            return LoadFailure(request.samples[0], f"it cannot be stacked with others in a shard: {reason}", "")


def _inputs_and_target(sample: Any, is_checked: bool) -> Any:
    """A sample as a dict, or as a pair; what a user's collate_fn gets is left as it is."""
    if not is_checked:
        return sample
    if isinstance(sample, Mapping):
        return {name: _tensor(part) for name, part in sample.items()}
    if (found := pair_of(sample)) is None:
        kind = type(sample).__name__
        what = "must be a pair (the model's input, the target), more inputs, or a dict"
        raise TypeError(f"it is a {kind}, and {what}; or give a collate_fn that makes one of them of a shard's samples")
    return found


def _tensor(part: Any) -> Any:
    """A list of numbers as a tensor: they belong to one sample."""
    return torch.as_tensor(part) if isinstance(part, list) and part and not isinstance(part[0], str) else part


def _plain(shard: Any) -> Any:
    """What a collate_fn made of a shard: a dict, or a pair."""
    if isinstance(shard, Mapping):
        return dict(shard)
    if (found := pair_of(shard)) is None:
        raise TypeError(f"collate_fn returned a {type(shard).__name__}, and must return a dict or (inputs, target)")
    return found


def _sentence(problem: BaseException) -> str:
    return "".join(traceback.format_exception_only(problem)).strip().splitlines()[-1]
