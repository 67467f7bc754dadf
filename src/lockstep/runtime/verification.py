"""Recompute and compare: now and then shards are computed once more, elsewhere and in another order.

Every shard must give the same bits whoever computes it, and whatever came before. A model, a loss or a data set that
keeps a state of its own breaks that, and so does a device that computes wrongly now and then (silent data corruption).
"""

import time
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from lockstep.backends import Backend, LossFuture, Tensor
from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.data.batch import Batch
from lockstep.partition.balance import Balance
from lockstep.partition.batch import split_into_shards
from lockstep.replicas.replica import AllGatherTensors, BatchSummary, Leaf, Replica, Shard
from lockstep.runtime.engine import Engine, has_all_ranks
from lockstep.runtime.out_of_memory import is_out_of_memory
from lockstep.runtime.step import EagerSteps, StepOptions, Steps, train_step

FIRST = 1, 2, 5  # steps after the first in which a few shards are computed again
PHASE = "forward and backward"
Digest = dict[str, Any]  # a checksum for each parameter, the loss and each buffer


class Unverified(RunError):
    """A shard did not give the same bits when it was computed again. The step has not happened."""


class Difference(NamedTuple):
    """A shard that did not give the same bits every time."""

    shard: int
    what: str  # the first parameter or buffer that differs
    wrong: list[int]  # ranks that gave something else than most
    is_certain: bool  # whether a majority agreed


class VerifiedSteps:
    """Does steps by `steps`, and verifies the first ones and every `every`-th."""

    def __init__(
        self,
        steps: Steps,
        engine: Engine,
        replicas: Sequence[Replica],
        options: StepOptions,
        balance: Balance,
        every: int,
    ) -> None:
        self._steps, self._engine, self._replicas = steps, engine, replicas
        self._options, self._balance, self._every = options._replace(bucket_mb=0.0), balance, every
        self._first: int | None = None  # step of this object
        self.max_in_flight = steps.max_in_flight
        self._seconds_before_capture = 0.0

    @property
    def why_eager(self) -> str:
        """Why steps are not captured."""
        return self._steps.why_eager

    @property
    def capture_seconds(self) -> float:
        """Seconds that were spent on capture so far, and on what comes before it: first uses, which compile kernels."""
        return self._steps.capture_seconds + self._seconds_before_capture

    def run(self, step: int, batch: Batch) -> LossFuture:
        """Does step number `step`; verified, if it is its turn."""
        if self._first is None:
            self._first = step
        if step - self._first in ((0,) if self._is_captured else FIRST):
            began = time.perf_counter()
            self._verify_two_shards(step, batch)
            self._seconds_before_capture += time.perf_counter() - began if self._is_captured else 0.0
        if step % self._every or self._is_captured:
            return self._steps.run(step, batch)
        return self._verified(step, batch)

    @property
    def _is_captured(self) -> bool:
        """Whether steps are replayed, which runs no Python. All ranks must say the same, also where one cannot."""
        return not isinstance(self._steps, EagerSteps) and not (has_all_ranks(self._engine) and self.why_eager)

    def _verify_two_shards(self, step: int, batch: Batch) -> None:
        """Two shards are computed on every rank, in different orders and one of them twice; then comes the step."""
        shards = split_into_shards(batch.num_samples, self._options.num_shards)
        self._check_samples(batch, shards, 0)
        each = partial(self._engine.each, PHASE)
        states = each(lambda rank, device, replica: replica.kept_state(only_counters=True), self._replicas)
        self._compute_again(step, batch, shards)
        kept = each(lambda rank, device, replica, state: replica.changed_state(state, True), self._replicas, states)
        if names := [name for of_rank in self._engine.all_gather(kept) for name in of_rank]:
            raise Unverified(f"step {step}: while a shard is computed, {_named(names)}")

    def _compute_again(self, step: int, batch: Batch, shards: list[range]) -> None:
        if self._options.shards_together:  # they go through the model with those of all ranks
            self._compare(step, batch, self._observed_twice(step, batch))
            return

        def work(rank: int, device: Device, replica: Replica) -> list[list[Any]]:
            numbers = [number % len(shards) for number in (rank, rank + 1, rank)]
            try:
                return [[number, self._digest(rank, replica, step, batch, number)] for number in numbers]
            except Exception as problem:
                if not is_out_of_memory(problem):
                    raise
                traceback.clear_frames(problem.__traceback__)  # they hold what was computed so far
                return []  # the step itself will say which number of shards fits

        self._compare(step, batch, self._engine.all_gather(self._engine.each(PHASE, work, self._replicas)))

    def _verified(self, step: int, batch: Batch) -> LossFuture:
        """The whole step, each shard of which is computed by another rank too before the weights are updated."""
        engine, shards = self._engine, split_into_shards(batch.num_samples, self._options.num_shards)
        self._check_samples(batch, shards, -1)
        ranges = self._balance.ranges(len(shards), engine.num_ranks)
        if self._options.shards_together:
            self._compare(step, batch, self._observed_twice(step, batch))
            return self._steps.run(step, batch)
        observed = [Observed(replica, engine.backend) for replica in self._replicas]
        future = train_step(engine, observed, self._options, self._balance, step, batch)

        def work(rank: int, device: Device, own: Observed) -> list[list[Any]]:
            others = reversed(ranges[(rank + 1) % engine.num_ranks])
            return [*own.digests, *([n, self._digest(rank, own.replica, step, batch, n)] for n in others)]

        self._compare(step, batch, engine.all_gather(engine.each(PHASE, work, observed)))
        engine.each("update", lambda rank, device, own: own.update_now(), observed)
        return future

    def _observed_twice(self, step: int, batch: Batch) -> list[list[list[Any]]]:
        """What all shards give in a step without an update, and in the same once more."""
        observed = [Observed(replica, self._engine.backend) for replica in self._replicas]
        for _ in range(2):
            train_step(self._engine, observed, self._options, self._balance, step, batch)
            self._engine.each(PHASE, lambda rank, device, replica: replica.undo_step(), self._replicas)
        return self._engine.all_gather([own.digests for own in observed])

    def _digest(self, rank: int, replica: Replica, step: int, batch: Batch, number: int) -> Digest:
        samples = split_into_shards(batch.num_samples, self._options.num_shards)[number]
        X, y = batch.fetch(rank, samples.start, samples.stop)
        replica.begin_step(step)
        (leaf,) = replica.forward_backward([Shard(number, len(samples), X, y)], _alone)
        return replica.digest(leaf)

    def _check_samples(self, batch: Batch, shards: list[range], at: int) -> None:
        """Loads the samples of one of this process's shards again."""
        ranges = self._balance.ranges(len(shards), self._engine.num_ranks)
        own = [shards[number] for rank in self._engine.local_ranks for number in ranges[rank]]
        if batch.check is not None and own:
            batch.check(own[at].start, own[at].stop)

    def _compare(self, step: int, batch: Batch, seen: list[list[list[Any]]]) -> None:
        """Raises an error where a shard was seen with different digests; `seen` has those of each rank."""
        by_shard: dict[int, list[tuple[int, Digest]]] = {}
        for rank, of_rank in enumerate(seen):
            for number, digest in of_rank:
                by_shard.setdefault(number, []).append((rank, digest))
        number = next((n for n, found in sorted(by_shard.items()) if any(d != found[0][1] for _, d in found)), None)
        if number is None:
            return
        wrong, found, each = number, by_shard[number], partial(self._engine.each, PHASE)
        states = each(lambda rank, device, replica: replica.kept_state(), self._replicas)
        if self._options.shards_together:
            self._observed_twice(step, batch)
        else:
            again = each(lambda rank, _, replica: self._digest(rank, replica, step, batch, wrong), self._replicas)
            found += enumerate(self._engine.all_gather(again))
        changed = each(lambda rank, device, replica, before: replica.changed_state(before), self._replicas, states)
        names = [name for of_rank in self._engine.all_gather(changed) for name in of_rank]
        self._raise(step, _difference(wrong, found), names)

    def _raise(self, step: int, difference: Difference, changed: list[str]) -> None:
        devices = self._engine.devices
        who = ", ".join(f"rank {rank} ({devices[rank]})" for rank in difference.wrong)
        what = f"step {step}: shard {difference.shard} did not give the same bits when it was computed again"
        said = f"{what}: first in {difference.what}, on {who}"
        if changed:
            raise Unverified(f"{said}. The cause: while a shard is computed, {_named(changed)}")
        sure = "" if difference.is_certain else " (no majority agrees)"
        raise Unverified(
            f"{said}{sure}. Nothing that the model or the loss keeps was seen to change: look for a device or memory "
            f"that fails (silent data corruption), for code that treats devices differently, or for random numbers "
            f"of another library."
        )


class Observed:
    """A replica in a step that is verified: it remembers what its shards gave, and its update waits."""

    def __init__(self, replica: Replica, backend: Backend) -> None:
        self.replica, self._backend = replica, backend
        self.digests: list[list[Any]] = []  # number and digest of each shard
        self._waiting: tuple[int, Tensor, BatchSummary] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replica, name)

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        """The replica's leaves."""
        leaves = self.replica.forward_backward(shards, all_gather)
        self.digests += [[s.number, self.replica.digest(leaf)] for s, leaf in zip(shards, leaves, strict=True)]
        return leaves

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        """Comes later."""
        own = self._backend.copy_to(total, self._backend.device_of(total))  # its memory is used again
        self._waiting = step, own, batch

    def update_now(self) -> None:
        """The update that has waited."""
        assert self._waiting is not None, "the step has ended"
        self.replica.update(*self._waiting)


def _named(changed: list[str]) -> str:
    names = " and ".join(list(dict.fromkeys(changed))[:3])
    return (
        f"{names} changes, and is kept for the next. The weights would depend on the number of devices. Keep no state "
        f"there, or make it a buffer of the model: register_buffer."
    )


def _alone(layer: str, tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def _difference(number: int, found: list[tuple[int, Digest]]) -> Difference:
    """Who gave something else than most, and in what."""
    texts = [(rank, repr(sorted(digest.items()))) for rank, digest in found]
    usual, votes = Counter(text for _, text in texts).most_common(1)[0]
    right = next(digest for (_, text), (_, digest) in zip(texts, found, strict=True) if text == usual)
    wrong = next(digest for (_, text), (_, digest) in zip(texts, found, strict=True) if text != usual)
    names = [name for name in {**right, **wrong} if right.get(name) != wrong.get(name)]
    ranks = sorted({rank for rank, text in texts if text != usual})
    return Difference(number, names[0], ranks, 2 * votes > len(found))
