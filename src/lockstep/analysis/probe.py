"""Real steps of small batches whose instructions are timed: interpreter, replicas and transport are those of a run."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from math import isfinite
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from lockstep.analysis.loading import FEW
from lockstep.backends import Tensor
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.data.batch import Batch, BatchSource
from lockstep.parallel.combined import combined
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.ranks import split_over_ranks
from lockstep.replicas.replica import Replica, StageTensors
from lockstep.runtime.engine import Engine, Position, Rank, StepInput
from lockstep.runtime.interpreter import Interpreter
from lockstep.runtime.thread_transport import ThreadGroup
from lockstep.runtime.transport import TransferGroup, Transport
from lockstep.schedules.clock import Link
from lockstep.schedules.instructions import Instruction, Schedule
from lockstep.training.replica_set import ReplicaSet
from lockstep.training.setup import MODULES, Prepared, inprocess_engine, model_split

PING_ENTRIES = 1_000_000


class Timed(NamedTuple):
    """An instruction, and when it was executed."""

    rank: int
    instruction: Instruction
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class TimedStep(NamedTuple):
    """A step whose instructions were timed."""

    instructions: list[Timed]
    seconds: float  # as whoever waits for the step sees it
    sent_bytes: dict[tuple[str, int], int]  # by channel and round: activations, of the stages whose they are
    gathered: tuple[int, int]  # collectives in mid-pass of a rank, and the bytes that it handed to the others in them
    kept_bytes: list[int]  # of activations, by rank, where that was asked for

    def of(self, kind: type, rank: int | None = None) -> list[Timed]:
        """The instructions of a kind, of one rank or of all."""
        found = [one for one in self.instructions if isinstance(one.instruction, kind)]
        return [one for one in found if rank is None or one.rank == rank]


class TimedInterpreter(Interpreter):
    """Takes the time of each instruction. Work on a GPU is waited for."""

    def __init__(self, rank: Rank, schedule: Schedule, transport: Transport) -> None:
        super().__init__(rank, schedule, transport)
        self.times: list[Timed] = []

    def execute(self, instruction: Instruction) -> None:
        start, rank = time.perf_counter(), self.rank
        super().execute(instruction)
        rank.backend.synchronize(rank.device)
        self.times.append(Timed(rank.number, instruction, start, time.perf_counter()))


class CountingTransport:
    """A transport that counts what goes through it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sent_bytes: dict[tuple[str, int], int] = {}
        self.num_gathers = self.gathered_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def start(self, group: TransferGroup) -> None:
        """Starts to send and receive."""
        key = group.key.channel, group.key.round
        self.sent_bytes[key] = self.sent_bytes.get(key, 0) + sum(bytes_of(value) for _, value in group.sends)
        self._transport.start(group)

    def all_gather_tensors(self, ranks: Sequence[int], layer: str, own: list[Tensor]) -> list[Tensor]:
        """A collective in mid-pass."""
        self.num_gathers += 1
        self.gathered_bytes += sum(map(bytes_of, own))
        return self._transport.all_gather_tensors(ranks, layer, own)


def bytes_of(value: Any) -> int:
    """The size of a tensor, or of what crosses a cut."""
    return sum(map(bytes_of, value.values)) if isinstance(value, StageTensors) else int(getattr(value, "nbytes", 0))


class Probe:
    """The replicas of a run with some settings, on the devices at hand."""

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        engine: Engine,
        source: BatchSource,
        transports: Callable[[], Sequence[Transport]],  # of the local ranks, for a step
    ) -> None:
        self._config, self._engine, self._source, self.transports = config, engine, source, transports
        self.task = prepared.task
        placement = self.task.placement(config, engine.num_ranks)
        make, initial = self.task.replica, self.task.initial
        self.replicas: Sequence[Replica] = engine.each(
            "replicate", lambda rank, device: make(device, initial, None, placement.part_of(rank))
        )
        self.set = ReplicaSet(engine, self.replicas, placement, initial)
        self.split = model_split(config, self.set)
        self.devices: list[Device] = engine.devices
        self._order, self._step = self.task.order(0)[: None if source.in_memory else FEW], 0
        self._batches: dict[tuple[int, ...], Batch] = {}

    def schedule(self, num_shards: int) -> Schedule:
        """What each rank does in a step of so many shards."""
        if self.split is None:
            entries, exchange = self.replicas[0].entries, self._config.exchange
            ranges = tuple(split_over_ranks(num_shards, self._engine.num_ranks))
            return data_parallel(DataParallel(ranges, entries, (entries,), exchange))
        ranges = tuple(split_over_ranks(num_shards, self.split.grid.data))
        return combined(self.split.step(ranges, self._config.exchange, together=False))

    def run(self, shard_sizes: Sequence[int], counts_kept: bool = False) -> TimedStep:
        """A step with shards of these sizes; activations are counted where that is asked for, which takes time."""
        sizes, self._step = tuple(shard_sizes), self._step + 1
        shards = [range(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]
        batch, schedule, engine = self._batch(sizes, shards), self.schedule(len(sizes)), self._engine
        transports = [CountingTransport(transport) for transport in self.transports()]
        interpreters = []
        for rank, transport in zip(engine.local_ranks, transports, strict=True):
            one = Rank(rank, engine.devices[rank], engine.backend, Position(step=self._step))
            interpreters.append(TimedInterpreter(one, schedule, cast(Transport, transport)))
        work = StepInput(self._step, batch, shards)

        def run(rank: int, device: Device, replica: Replica, interpreter: TimedInterpreter) -> int:
            with self._counted() if counts_kept else nullcontext() as kept:
                results = interpreter.run(work, replica, no_overlap)
            if self._step == 1 and not all(isfinite(loss) for each in results for loss in each.losses):
                raise RunError("the loss of its first batch is NaN or infinite")
            return 0 if kept is None else kept.total

        began = time.perf_counter()
        kept_bytes = engine.each("forward and backward", run, self.replicas, interpreters)
        seconds = float(max(engine.all_gather([time.perf_counter() - began] * len(engine.local_ranks))))
        sent = [transport.sent_bytes for transport in transports]
        return TimedStep(
            [one for each in interpreters for one in each.times],
            seconds,
            {key: max(one.get(key, 0) for one in sent) for key in set().union(*sent)},
            (transports[0].num_gathers, transports[0].gathered_bytes),
            kept_bytes,
        )

    def _counted(self) -> AbstractContextManager[Any]:
        if self._engine.backend.name != MODULES:
            return nullcontext()
        from lockstep.replicas.saved_bytes import saved_bytes  # loads its framework

        return saved_bytes()

    def ping(self, num_entries: int, num_times: int = 30) -> float:
        """Seconds until a vector of so many entries is with another rank, and one of the other's is here."""
        engine = self._engine

        def run(rank: int, device: Device, transport: Transport) -> float:
            own = [engine.backend.zeros(num_entries, device)]
            transport.all_gather_tensors(engine.local_ranks, "ping", own)
            began = time.perf_counter()
            for _ in range(num_times):
                transport.all_gather_tensors(engine.local_ranks, "ping", own)
            return (time.perf_counter() - began) / num_times

        return float(max(engine.each("exchange", run, self.transports())))

    def link(self) -> Link:
        """Latency and bandwidth between ranks; references cost no bandwidth."""
        latency = self.ping(1)
        seconds = self.ping(PING_ENTRIES, 5) - latency
        return Link(latency, 4 * PING_ENTRIES / max(seconds, 1e-9))

    def kept_bytes(self, size: int) -> float:
        """The activations of a sample, in shards of so many."""
        return self.run([size] * len(self.devices), counts_kept=True).kept_bytes[0] / size

    def _batch(self, sizes: tuple[int, ...], shards: list[range]) -> Batch:
        if sizes not in self._batches:
            order = np.resize(self._order, sum(sizes))  # samples may be there more than once
            self._batches[sizes] = next(iter(self._source.batches(order, len(order), lambda _: shards, 0)))
        return self._batches[sizes]


def no_overlap(interpreter: Interpreter) -> Callable[[], NoReturn]:
    """Steps of a probe have one bucket."""
    raise NotImplementedError("a probe's exchange comes after its passes")


@contextmanager
def opened_probe(config: RunConfig, prepared: Prepared) -> Iterator[Probe]:
    """A probe, whose threads end with it."""
    with inprocess_engine(config, prepared) as engine, closing(prepared.task.train_set(engine)) as source:

        def transports() -> list[Transport]:
            group = ThreadGroup(engine.backend, engine.devices, engine.memories, engine.timeout)
            return [group.transport(rank) for rank in engine.local_ranks]

        yield Probe(config, prepared, engine, source, transports)
