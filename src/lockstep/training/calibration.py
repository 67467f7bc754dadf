"""After a traced run, a few steps more without updates: how long a shard takes when no other rank works.

A step of one shard keeps one rank busy, or one stage after the other, while all others wait. It goes through the same
engine, replicas and kernels as the run did. No weight, buffer or optimizer state changes.
"""

from collections.abc import Sequence
from statistics import median, median_low
from typing import Any

from lockstep.attribution.step_times import PASSES, References
from lockstep.backends import peak_memory
from lockstep.backends.hardware import cpu
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import CaptureError, RunError
from lockstep.core.tracing import NONE, Span
from lockstep.data.batch import Batch
from lockstep.data.dataset import leaves_of, map_leaves
from lockstep.partition.balance import Balance
from lockstep.partition.batch import split_into_shards
from lockstep.replicas.replica import BatchSummary, Replica, Shard
from lockstep.runtime.cuda_graph import CapturedSteps
from lockstep.runtime.engine import has_all_ranks
from lockstep.runtime.step import StepOptions, train_step
from lockstep.training.setup import model_split, step_options
from lockstep.training.state import TrainingState

SECONDS = 2.0  # that the measurement may take, about
FEW, MANY = 2, 9  # times that each is measured; the first time loads kernels, and does not count
MEMORY_SHARE = 0.5  # of a device, that a larger shard may take


class WithoutUpdate:
    """A replica that computes gradients, and is not updated by them."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def update(self, step: int, total: Any, batch: BatchSummary) -> None:
        """Nothing."""

    def set_parameters(self, entries: range, values: Any) -> None:
        """Nothing: they would be those that it has."""

    def finish_update(self) -> None:
        """Nothing."""


class Calibration:
    """Measures on a batch that the run had. A collective of all ranks."""

    def __init__(self, config: RunConfig, state: TrainingState, batch: Batch) -> None:
        self._state, self._replicas, self._engine = state, state.replicas, state.replicas.engine
        self._step, self._batch = state.progress.step + 1, batch  # a step that has not been: it is undone
        split = model_split(config, state.replicas)
        self._options = step_options(config, self._engine)._replace(bucket_mb=0.0, model_split=split)
        self._num_copies = self._engine.num_ranks if split is None else split.grid.data
        self._shards = split_into_shards(batch.num_samples, config.num_shards)

    def references(self, memory_before: dict[str, int]) -> References | None:
        """What was measured; None where shards cannot be computed by themselves, as one layer needs all of them."""
        steps = self._state.steps
        if isinstance(steps, CapturedSteps) and not steps.why_eager:
            return self._of_graphs(steps)
        if self._options.shards_together:
            return None
        kinds = [(self._options, Batch(self._batch.num_samples, self._batch.fetch))]
        kinds += [(self._options._replace(num_shards=1), self._first(size)) for size in self._sizes(memory_before)]
        seconds = [[self._passes(*kind)] for kind in kinds]
        for _ in range(self._times(seconds)):
            for kind, found in zip(kinds, seconds, strict=True):
                found.append(self._passes(*kind))
        whole, *alone = [_medians(found[1:]) for found in seconds]  # the first time loads kernels
        sizes = [batch.num_samples for _, batch in kinds[1:]]
        return References(dict(zip(sizes, map(sum, alone), strict=True)), sum(whole), self._slowdown(whole, alone[0]))

    def _of_graphs(self, steps: CapturedSteps) -> References | None:
        """The same of CUDA graphs, in which the shards of a whole batch are side by side: fewer and fewer shards."""
        numbers = [self._options.num_shards]
        while numbers[-1] > 1:
            numbers.append(numbers[-1] // 2)
        num_samples, whole = self._batch.num_samples, dict[int, float]()
        try:
            for number in numbers:
                whole[number] = steps.seconds_without_update(self._step, self._batch, number)
        except (CaptureError, RunError):  # fewer shards need more memory
            if not whole:
                return None
        self._engine.each(
            "forward and backward", lambda rank, device, replica: replica.undo_step(), self._replicas.local
        )
        alone = {-(-num_samples // number): seconds / number for number, seconds in whole.items()}
        return References(alone, whole[numbers[0]], 1.0)

    def _slowdown(self, whole: Sequence[float], alone: Sequence[float]) -> float:
        """How many times as long a shard takes while all ranks work; that of the typical rank, and 1 where k is 1."""
        if self._engine.num_ranks == 1:
            return 1.0
        num_shards = [len(own) for own in Balance().ranges(len(self._shards), self._num_copies)]
        in_copy = len(whole) // self._num_copies  # ranks that work on the same shards
        ratios = [
            whole[rank] / num_shards[rank // in_copy] / alone[rank] for rank in range(len(whole)) if alone[rank] > 0
        ]
        return max(1.0, median_low(ratios)) if ratios else 1.0

    def _sizes(self, memory_before: dict[str, int]) -> list[int]:
        """The samples of a shard, first, and multiples of them up to a rank's part of the batch, if they have room."""
        size, share = len(self._shards[0]), self._batch.num_samples // self._num_copies
        found, engine = [size], self._engine
        own = [engine.devices[rank] for rank in engine.local_ranks]
        peaks = peak_memory(engine.backend, own)
        total = MEMORY_SHARE * (engine.backend.gpu(own[0].number) if own[0].kind == "cuda" else cpu()).num_bytes
        used = max((peak - memory_before.get(name, 0), peak) for name, peak in peaks.items())
        fits = min(engine.all_gather([(total - used[1]) / max(used[0], 1) for _ in own]))  # times what shards took
        while 2 * found[-1] <= share and 2 * found[-1] / size <= 1 + fits:
            found.append(2 * found[-1])
        if self._options.model_split is not None:
            found.append(size // 2)  # a smaller bubble
        return [size, *(other for other in found[1:] if other > 1 and self._works(other))]

    def _works(self, size: int) -> bool:
        """Whether a model that was trained with shards of one size takes one of another: it need not."""
        engine, batch = self._engine, self._first(size)
        if self._options.model_split is not None:
            return has_all_ranks(engine) and self._is_computed(batch)

        def work(rank: int, device: Device, replica: Replica) -> bool:
            try:
                if rank == 0:
                    X, y = batch.fetch(rank, 0, batch.num_samples)
                    replica.begin_step(self._step)
                    replica.forward_backward([Shard(0, batch.num_samples, X, y)], lambda layer, tensors: tensors)
            except Exception:  # of the user's model
                return False
            finally:
                replica.undo_step()
            return True

        return all(engine.all_gather(engine.each("forward and backward", work, self._replicas.local)))

    def _is_computed(self, batch: Batch) -> bool:
        """The same for parts of a model, which only all ranks together can try."""
        try:
            self._passes(self._options._replace(num_shards=1), batch)
        except RunError:
            return False
        return True

    def _first(self, size: int) -> Batch:
        """The first samples of the batch as a batch; put together from shards, where they were loaded as such."""
        if self._batch.check is None:
            return Batch(size, self._batch.fetch)
        parts = [shard for shard in self._shards if shard.stop <= size] or self._shards[:1]
        made: dict[int, Any] = {}

        def fetch(rank: int, start: int, stop: int) -> tuple[Any, Any]:
            if rank not in made:
                made[rank] = self._together([self._batch.fetch(rank, part.start, part.stop) for part in parts])
            X, y = made[rank]
            return X, y

        return Batch(parts[-1].stop, fetch)

    def _together(self, pieces: list[Any]) -> Any:
        """The samples of several shards as one."""
        if len(pieces) == 1:
            return pieces[0]
        columns = iter([list(column) for column in zip(*map(leaves_of, pieces), strict=True)])

        def put(leaf: Any) -> Any:
            return self._engine.backend.concat(next(columns)) if hasattr(leaf, "dtype") else leaf

        return map_leaves(pieces[0], put)

    def _times(self, seconds: list[list[list[float]]]) -> int:
        """How often each is measured: as often as there is time for, and the same on all ranks."""
        once = sum(max(found[0]) for found in seconds)
        return max(FEW, min(MANY, int(SECONDS / max(once, 1e-6))))

    def _passes(self, options: StepOptions, batch: Batch) -> list[float]:
        """Seconds of each rank's passes in a step without an update."""
        engine, traces = self._engine, self._engine.traces
        for trace in traces:
            trace.take_spans()
        held = [WithoutUpdate(replica) for replica in self._replicas.local]
        train_step(engine, held, options, Balance(), self._step, batch)
        engine.each("forward and backward", lambda rank, device, replica: replica.undo_step(), self._replicas.local)
        return engine.all_gather([_of_shards(trace.take_spans()) for trace in traces])


def _of_shards(spans: Sequence[Span]) -> float:
    return sum(one.seconds for one in spans if one.name in PASSES and one.shard != NONE)


def _medians(found: list[list[float]]) -> list[float]:
    """Of each rank."""
    return [median(times) for times in zip(*found, strict=True)]
