"""A traced run: what its loop and its ranks did, gathered from all processes, and what it comes to."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from lockstep.attribution.step_times import References, TracedRun
from lockstep.attribution.waterfall import explain_run
from lockstep.attribution.what_if import MakeSchedule
from lockstep.backends import peak_memory
from lockstep.config import RunConfig, settings_in
from lockstep.core.chrome_trace import RankSpans, chrome_trace
from lockstep.core.errors import RunError
from lockstep.core.layout import Array
from lockstep.core.settings import option_of
from lockstep.core.tracing import NONE, HostTrace, Span, SpanName, Trace
from lockstep.data.batch import Batch
from lockstep.parallel.combined import combined
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.report.events import Traced
from lockstep.runtime.engine import has_all_ranks
from lockstep.runtime.step import Steps
from lockstep.schedules.exchanges import KEEPS_THE_TREE
from lockstep.schedules.instructions import Schedule
from lockstep.training.calibration import Calibration
from lockstep.training.setup import model_split
from lockstep.training.state import TrainingState

BOOT = "/proc/sys/kernel/random/boot_id"  # the same for all processes of a machine
ROWS = ("spans", "exchange", "on_device", "host")
NAMES = list(SpanName)


class RunTrace:
    """What is recorded while a run is traced; nothing, where it is not."""

    def __init__(self, config: RunConfig, state: TrainingState) -> None:
        engine = state.replicas.engine
        self._config, self._engine = config, engine
        self._split = model_split(config, state.replicas) if config.trace else None
        self._host = HostTrace()
        self._is_open = config.trace  # nobody was told yet
        self._batch: Batch | None = None  # the largest, and the last of these
        devices = [engine.devices[rank] for rank in engine.local_ranks] if config.trace else []
        self._memory_before = peak_memory(engine.backend, devices) if devices else {}
        engine.traces[:] = [Trace(engine.backend.timed(device)) for device in devices]

    def span(self, name: SpanName, step: int = NONE) -> AbstractContextManager[None]:
        """What the loop does meanwhile is called `name`."""
        return self._host.span(name, step) if self._is_open else nullcontext()

    def loaded(self, batches: Iterable[Batch], first_step: int) -> Iterator[Batch]:
        """The batches of an epoch; the time until each of them is there is loading."""
        iterator, step = iter(batches), first_step
        while True:
            began = time.monotonic()
            batch = next(iterator, None)
            if batch is None:
                return
            if self._is_open:
                self._host.add(SpanName.LOADING, step, began)
                self._host.num_samples[step] = batch.num_samples
                if self._batch is None or batch.num_samples >= self._batch.num_samples:
                    self._batch = batch
            yield batch
            step += 1

    @contextmanager
    def step(self, number: int, steps: Steps) -> Iterator[None]:
        """Step `number` is done, or started; perhaps it is captured as a CUDA graph first."""
        began, before = time.monotonic(), steps.capture_seconds
        yield
        if self._is_open:
            is_captured = steps.capture_seconds > before
            self._host.add(SpanName.CAPTURE if is_captured else SpanName.STEP, number, began)

    def measured(self, state: TrainingState) -> Iterator[Traced]:
        """The trace of all ranks, and what it comes to beside a device that works alone. A collective."""
        if self._is_open:
            own = self._taken()  # before there are others
            references = None
            if self._batch is not None:
                try:
                    references = Calibration(self._config, state, self._batch).references(self._memory_before)
                except RunError:  # the training is over, and well
                    if not has_all_ranks(self._engine):  # the others wait for this rank
                        raise
            yield self._traced(self._engine.all_gather(own), state, references)

    def of_all(self, state: TrainingState) -> Iterator[Traced]:
        """The trace of all ranks of a run that is stopped. A collective."""
        if self._is_open:
            yield self._traced(self._engine.all_gather(self._taken()), state)

    def of_this_process(self, state: TrainingState) -> Iterator[Traced]:
        """The trace of the ranks of this process, whatever has become of the others."""
        if self._is_open:
            yield self._traced(self._taken(), state)

    def kept(self, traced: Traced) -> list[dict[str, Any]]:
        """The trace, where there is no folder that it is written to."""
        return traced.chrome if self._config.out is None else []

    def _taken(self) -> list[dict[str, Any]]:
        """What the ranks of this process did, as values that other processes can be sent."""
        self._is_open, engine, found = False, self._engine, []
        for rank, trace in zip(engine.local_ranks, engine.traces, strict=True):
            host = self._host.spans if rank == engine.local_ranks[0] else []
            rows = (trace.take_spans(), trace.exchange.take_spans(), trace.take_device_spans(), host)
            arrays = {name: _packed(row) for name, row in zip(ROWS, rows, strict=True)}
            found.append({"rank": rank, "process": engine.local_ranks[0], "clock": _clock(), **arrays})
        return found

    def _traced(
        self, gathered: list[dict[str, Any]], state: TrainingState, references: References | None = None
    ) -> Traced:
        config, engine, placement = self._config, self._engine, state.replicas.placement
        ranks, hosts = [], {}
        for one in gathered:
            rank, shift = one["rank"], _shift(gathered[0]["clock"], one["clock"])
            *rows, host = (_unpacked(one[name], shift) for name in ROWS)
            if rank == one["process"]:
                hosts[rank] = host
            ranks.append(RankSpans(rank, str(engine.devices[rank]), one["process"], *rows))
        chrome = chrome_trace(ranks, hosts)
        if len(ranks) < engine.num_ranks:
            return Traced(chrome, f"the trace has what rank {ranks[0].number} did; those of other processes are lost")
        options = {option_of(each): getattr(config, each.name) for each in settings_in()}
        explanation = explain_run(
            TracedRun(
                ranks=ranks,
                hosts=hosts,
                num_samples=self._host.num_samples,
                num_shards=config.num_shards,
                parts=[rank.number % placement.grid.num_parts for rank in ranks],
                divides_update=not placement.every_rank_has_all,
                runs_ahead=state.steps.max_in_flight > 0 and not state.steps.why_eager,
                references=references,
                settings={**options, "devices": ",".join(map(str, engine.devices))},
            ),
            self._make_schedule(state),
        )
        if explanation is None:
            return Traced(chrome, "no step was traced")
        where = f"{config.out}/trace.json opens in Perfetto" if config.out else "the trace is in result.trace"
        return Traced(chrome, explanation.sentence(), [*explanation.lines(), where], explanation.summary())

    def _make_schedule(self, state: TrainingState) -> MakeSchedule:
        """The schedules that this run could have."""
        config, split, entries = self._config, self._split, state.replicas.local[0].entries

        def make(num_shards: int, own: tuple[range, ...]) -> Schedule:
            if split is not None:
                return combined(split.step(own, config.exchange, False))
            exchange = config.exchange if config.exchange in KEEPS_THE_TREE else "sharded"
            return data_parallel(DataParallel(own, entries, (entries,), exchange))

        return make


def _clock() -> list[Any]:
    """The machine, and how far its clock is from that of the world."""
    try:
        with open(BOOT, encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return [boot, time.time() - time.monotonic()]


def _shift(first: list[Any], other: list[Any]) -> float:
    """What is added to the times of another machine; processes of one machine have one clock."""
    return 0.0 if first[0] == other[0] else float(other[1] - first[1])


def _packed(spans: Sequence[Span]) -> Array:
    """A row of numbers for each span; a hundred thousand of them are too many for plain values."""
    rows = [(NAMES.index(SpanName(one.name)), *one[1:]) for one in spans]
    return np.array(rows, np.float64).reshape(-1, len(Span._fields))


def _unpacked(rows: Array, shift: float) -> list[Span]:
    """The spans again, `shift` seconds later."""
    return [
        Span(NAMES[int(name)], int(step), start + shift, end + shift, int(shard), int(stage))
        for name, step, start, end, shard, stage in rows.tolist()
    ]
