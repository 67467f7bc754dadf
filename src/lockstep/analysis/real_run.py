"""Real steps of a run, one after the other, without its files: what `plan --check` measures."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from typing import cast

import numpy as np

from lockstep.backends import Backend
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.data.batch import Batch, BatchSource, LoadingSource
from lockstep.partition.balance import balance_for
from lockstep.partition.batch import split_into_shards
from lockstep.runtime.engine import Engine
from lockstep.runtime.inprocess import InProcess
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.setup import Prepared, inprocess_engine, make_steps

LONG = 500  # steps of an epoch
NUM_IN_FLIGHT = 10  # steps that a GPU is timed for: the host launches some ahead, and does not wait for each


class RealRun:
    """A model in training that is neither shown, nor compared, nor saved."""

    def __init__(self, config: RunConfig, prepared: Prepared, engine: Engine, source: BatchSource) -> None:
        task, placement = prepared.task, prepared.task.placement(config, engine.num_ranks)
        local = engine.each(
            "replicate", lambda rank, device: task.replica(device, task.initial, None, placement.part_of(rank))
        )
        replicas = ReplicaSet(engine, local, placement, task.initial)
        self._steps = make_steps(config, replicas, balance_for(config.balance))
        self._number, self._batches = 0, self._endless(config, prepared, source)
        is_gpu = engine.devices[0].kind == "cuda"
        self._num_settling, self._num_counted = 1, NUM_IN_FLIGHT if is_gpu else 1
        if not source.in_memory:  # what was loaded ahead meanwhile is used up, and each worker's shards are counted
            loader = cast(LoadingSource, source)
            self._num_settling += -(-loader.num_workers * loader.num_ahead // config.num_shards)
            self._num_counted = -(-2 * max(1, loader.num_workers) // config.num_shards)

    @staticmethod
    def _endless(config: RunConfig, prepared: Prepared, source: BatchSource) -> Iterator[Batch]:
        """Full batches only: the last one of an epoch may be short. With a loader, epochs are long: it starts anew."""
        split, size = partial(split_into_shards, num_shards=config.num_shards), config.batch_size
        for epoch in count():
            order = prepared.task.order(epoch)
            whole = order[: len(order) // size * size]
            if not source.in_memory:
                whole = np.resize(whole, max(len(whole), LONG * size))
            yield from source.batches(whole, size, split, epoch)

    def seconds_in_turn(self) -> float:
        """The time of a step after others of this run.

        It finds memory and caches as it needs them, and no more samples loaded than a run has.
        """
        self.seconds_per_step(self._num_settling)
        return self.seconds_per_step(self._num_counted)

    def seconds_per_step(self, num_steps: int = 1) -> float:
        """The time of some steps, with what it takes to get their batches."""
        began = time.perf_counter()
        for _ in range(num_steps):
            self._number += 1
            future = self._steps.run(self._number, next(self._batches))
        future.result()
        return (time.perf_counter() - began) / num_steps


@contextmanager
def opened_run(config: RunConfig, prepared: Prepared) -> Iterator[RealRun]:
    """A run, whose threads end with it."""
    with inprocess_engine(config, prepared) as engine, closing(prepared.task.train_set(engine)) as source:
        yield RealRun(config, prepared, engine, source)


class SharedEngines:
    """Engines for runs that take turns, within one session of the framework.

    Runs on the same CPU devices share their threads: malloc has memory for each thread, up to some number of them, and
    with the threads of a dozen runs they would get in each other's way. Captured steps belong to an engine.
    """

    def __init__(self, undo: ExitStack, backend: Backend, devices: list[Device]) -> None:
        """For runs on some of these devices. What it opens, when it is first needed, is closed with `undo`."""
        self._undo, self._backend, self._devices = undo, backend, devices
        self._engines: dict[tuple[Device, ...], InProcess] = {}

    def run(self, config: RunConfig, prepared: Prepared) -> RealRun:
        """A run on its devices."""
        if not self._engines:
            self._undo.enter_context(self._backend.session(self._devices))
        devices = tuple(prepared.devices)
        engine = self._engines.get(devices)
        if engine is None or devices[0].kind == "cuda":
            engine = self._undo.enter_context(inprocess_engine(config, prepared, has_session=False))
            self._engines[devices] = engine
        source = self._undo.enter_context(closing(prepared.task.train_set(engine)))
        return RealRun(config, prepared, engine, source)
