"""The same step on one GPU, recorded once for each size of batch and replayed from then on.

A step of a small model is hundreds of requests to the GPU, and asking takes longer than doing. What computes the sum of
the gradients is recorded: the gathering of samples, every shard's forward and backward beside the others, the tree, the
exchange. So is the update, if it is the same in every step from now on; else it is asked for anew each time, as its
learning rate is a number of the host. Nobody waits for the GPU within an epoch; the host is a few steps ahead of it.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.backends import Pending, Recorder
from lockstep.runtime import Batch, Engine, Exchanged, Gathered, InProcess, Replica
from lockstep.runtime.interpreter import is_out_of_memory
from lockstep.core.errors import NotRecorded, RunError
from lockstep.partition.batch import split_into_shards
from lockstep.runtime.step import sum_gradients, train_step


class Known(NamedTuple):
    """Losses that need not be waited for."""

    losses: list[float]

    def read(self) -> list[float]:
        return self.losses


class Recording(NamedTuple):
    """The step of one size of batch, or what comes before its update."""

    replay: Callable[[], None]
    exchanged: Exchanged  # its tensors are filled by each replay


class Steps:
    """Steps as they are; `ahead` is how many may be under way before somebody has to wait for the first of them."""

    ahead = 0

    def __init__(self, engine: Engine, replicas: Sequence[Replica], num_shards: int, problem: str = "") -> None:
        self._engine, self._replicas, self._num_shards = engine, replicas, num_shards
        self.problem = problem  # why steps are not recorded, where they were to be
        self._sizes: set[int] = set()  # of batches that were seen
        self._seconds = 0.0

    def __call__(self, step: int, batch: Batch) -> Pending:
        """Does step number `step`, or begins to; gives the losses of the shards, to be read when they are needed."""
        began, is_first = time.perf_counter(), batch.num_samples not in self._sizes
        pending = self._begun(step, batch)
        if is_first:
            self._sizes.add(batch.num_samples)
            self._seconds += time.perf_counter() - began
        return pending

    def first_seconds(self) -> float:
        """Seconds that the first steps of each size of batch took since the last time that this was asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begun(self, step: int, batch: Batch) -> Pending:
        return Known(train_step(self._engine, self._replicas, step, batch, self._num_shards))


class RecordedSteps(Steps):
    """Steps on the GPU of `recorder`."""

    ahead = 8

    def __init__(self, engine: InProcess, replicas: Sequence[Replica], num_shards: int, recorder: Recorder) -> None:
        super().__init__(engine, replicas, num_shards)
        self._one_thread, self._recorder = engine, recorder
        self._recordings: dict[tuple[int, bool], Recording] = {}  # samples of a batch, with the update? ->

    def _begun(self, step: int, batch: Batch) -> Pending:
        if not self.problem:
            try:
                return self._replayed(step, batch)
            except NotRecorded as problem:
                self.problem = str(problem)
            for replica in self._replicas:
                replica.forget()
        return super()._begun(step, batch)

    def _replayed(self, step: int, batch: Batch) -> Pending:
        assert batch.refill is not None, "samples in memory have it"
        shards = split_into_shards(batch.num_samples, self._num_shards)
        with self._one_thread.recording(self._recorder):
            batch.refill()
            with_update = all(replica.repeats_update(step) for replica in self._replicas)
            key = batch.num_samples, with_update
            if with_update:  # from now on: the other one has done its work
                self._recordings.pop((batch.num_samples, False), None)
            while key not in self._recordings:
                try:
                    self._recordings[key] = self._record(step, batch, shards, with_update)
                except RunError as problem:
                    if not is_out_of_memory(problem):
                        raise
                    if not self._recorder.narrow():
                        raise NotRecorded("it takes more memory than there is") from problem
                    for replica in self._replicas:
                        replica.forget()
            recording = self._recordings[key]
            for replica in self._replicas:
                replica.replay(step)
            recording.replay()
            if not with_update:
                self._engine.update(self._replicas, step, recording.exchanged, shards)
            return self._recorder.read_later(recording.exchanged.losses[0])

    def _record(self, step: int, batch: Batch, shards: list[range], with_update: bool) -> Recording:
        is_rehearsed = False

        def work() -> Exchanged:
            nonlocal is_rehearsed
            for replica in self._replicas:
                replica.record(step)
            exchanged = sum_gradients(self._engine, self._replicas, step, batch, shards)
            losses = self._recorder.together(exchanged.losses)
            if with_update and is_rehearsed:
                self._engine.update(self._replicas, step, exchanged, shards)
            elif with_update:
                gathered = Gathered([len(shard) for shard in shards], exchanged.rows, exchanged.used)
                for replica, total in zip(self._replicas, exchanged.totals, strict=True):
                    replica.rehearse_update(step, total, gathered)
            is_rehearsed = True
            return exchanged._replace(losses=[losses])

        return Recording(*self._recorder.record(work, lambda: [g for r in self._replicas for g in r.generators()]))


def steps_for(engine: Engine, replicas: Sequence[Replica], num_shards: int, in_memory: bool) -> Steps:
    """Recorded steps where engine, replicas and samples allow for it; else, `problem` says why not."""
    if not isinstance(engine, InProcess) or engine.recorder is None:
        return Steps(engine, replicas, num_shards)
    problems = [replica.recordable() for replica in replicas]
    if not in_memory:
        problems.append("samples are loaded one by one")
    if any(problems):
        return Steps(engine, replicas, num_shards, next(filter(None, problems)))
    return RecordedSteps(engine, replicas, num_shards, engine.recorder)
