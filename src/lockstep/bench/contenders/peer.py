"""One rank of a library that has a process for each device: what is the same for all such libraries."""

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.backends.hardware import cpu
from lockstep.backends.torch import torch_device
from lockstep.bench.contenders import Place
from lockstep.bench.contenders.feeds import in_memory, loaded
from lockstep.bench.contenders.models import loss_sum, module_for, set_precision
from lockstep.bench.work import Work, samples_of
from lockstep.core.device import Device
from lockstep.partition.batch import even_ranges
from lockstep.runtime.store import LOOPBACK, join_store, prefix_store

MEETING_SECONDS = 600.0
NUM_WORKERS = 2  # of the loader of each rank, where there is one


class Library(NamedTuple):
    """What a library does its own way."""

    wrap: Callable[[nn.Module, Any], tuple[Any, Any]]  # (module, optimizer) -> those to use in the loop
    backward: Callable[[Tensor], Any] = Tensor.backward
    autocast: Callable[[], Any] = contextlib.nullcontext  # around the module's call, where the library has none


class Choice(NamedTuple):
    """Settings that are faster on some machines and slower on others: all are tried, the fastest stays."""

    num_threads: int | None = None  # None: PyTorch's own choice
    channels_last: bool = False

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' * (self.num_threads != 1)} a process" if self.num_threads else ""
        return ", ".join(filter(None, [threads, "channels-last" if self.channels_last else ""]))


def join(work: Work, place: Place) -> torch.device:
    """Meets the other ranks, on this machine only; gives where this rank works."""
    where = torch_device(Device(place.device))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if where.type == "cuda" else "gloo",
        store=prefix_store(place.name, join_store(LOOPBACK, place.port, MEETING_SECONDS)),
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=timedelta(seconds=MEETING_SECONDS),
        device_id=where if where.type == "cuda" else None,
    )
    return where


def meet(where: torch.device) -> None:
    """Over when all ranks have come, and their devices have done what they were given."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    dist.barrier()
    if where.type == "cuda":
        torch.cuda.synchronize(where)


class Peer:
    """A rank that trains on its part of every batch. With its `best` settings, or as it comes."""

    def __init__(self, work: Work, place: Place, library: Callable[[torch.device], Library], best: bool) -> None:
        self._work, self._best, self._where = work, best, join(work, place)
        self._part = even_ranges(work.batch_size, place.num_ranks)[place.rank]
        self._data = samples_of(work)
        set_precision(work.precision)
        torch.backends.cudnn.benchmark = best
        self._library = library(self._where)
        counts: list[int | None] = [None]
        if best and not work.is_on_gpu:
            counts = [*sorted({1, max(cpu().num_cores // place.num_ranks, 1)})]
        layouts = [True, False] if best and self._data.X_train.ndim == 4 else [False]
        self._choices = [Choice(*both) for both in product(counts, layouts)]
        self._build(self._choices[0])

    def _build(self, choice: Choice) -> None:
        """Starts from the beginning, with these settings."""
        work, where = self._work, self._where
        module = module_for(work, self._data).to(where)
        if choice.channels_last:
            module = module.to(memory_format=torch.channels_last)
        fused = {"fused": True} if self._best else {}
        optimizer = torch.optim.SGD(module.parameters(), lr=work.learning_rate, **fused)
        self._module, self._optimizer = self._library.wrap(module, optimizer)
        if self._best:
            self._batches = in_memory(work, self._data, self._part, where, choice.channels_last)
        else:
            self._batches = loaded(work, self._data, self._part, NUM_WORKERS, True, pin_memory=work.is_on_gpu)
        if choice.num_threads is not None:
            torch.set_num_threads(choice.num_threads)

    def warm_up(self, num_steps: int) -> dict[str, Any]:
        choice = self._choices[0]
        if num_steps and len(self._choices) > 1:
            choice = self._choices[self._fastest(num_steps)]
            self._build(choice)
        if num_steps:
            self.run(num_steps)
        return {"chosen": str(choice)}

    def _fastest(self, num_steps: int) -> int:
        """The number of the choice that took the shortest time on the first rank."""
        seconds = []
        for choice in self._choices:
            self._build(choice)
            self.run(num_steps)
            seconds.append(self.run(num_steps)["seconds"])
        found = torch.tensor(seconds.index(min(seconds)), device=self._where)
        dist.broadcast(found, 0)
        return int(found)

    def run(self, num_steps: int) -> dict[str, Any]:
        batches = self._batches(num_steps)
        first = next(batches)  # a loader has started by now
        meet(self._where)
        began = time.perf_counter()
        for X, y in chain([first], batches):
            X, y = X.to(self._where, non_blocking=True), y.to(self._where, non_blocking=True)
            self._optimizer.zero_grad()
            with self._library.autocast():
                scores = self._module(X)
            loss = loss_sum(scores, y) / len(X)
            self._library.backward(loss)
            self._optimizer.step()
        meet(self._where)
        return {"seconds": time.perf_counter() - began, "loss": float(loss)}

    def close(self) -> None:
        """Ends at once, once all ranks are here: there is nothing to keep, and libraries take their time."""
        meet(self._where)
        os._exit(0)
