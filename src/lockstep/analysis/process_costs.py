"""What steps cost where every device has a process of its own: measured in worker processes, over the run's transport.

Processes share no lock of Python's, so passes at the same time slow each other down less than threads; what they send
is copied, over Gloo or NCCL. Activations take three messages (how many bytes follow, what they are, the tensors), and
are measured as such.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from lockstep.analysis.curves import Curve, curve_of
from lockstep.analysis.probe import Probe
from lockstep.analysis.profile import NO_LINK, Profile
from lockstep.analysis.timing import Sampler, rest_of, typical
from lockstep.analysis.unmeasurable import cannot_be_measured
from lockstep.analysis.workers import Member, in_workers
from lockstep.config import DEFAULT_SLICES, RunConfig
from lockstep.core.errors import ConfigError
from lockstep.data.batch import BatchSource
from lockstep.partition.buckets import BUCKET_MB
from lockstep.replicas.replica import StageTensors
from lockstep.runtime.engine import RankResult
from lockstep.runtime.transport import GroupKey, TransferGroup
from lockstep.schedules.clock import Link
from lockstep.schedules.instructions import ACTIVATIONS, GRADIENTS, ForwardBackward
from lockstep.training.setup import Prepared, prepare
from lockstep.training.task import UserObjects

TIMES = 31  # that a message is sent
MIN_ENTRIES = 65_536  # of a vector that tells the bandwidth


class ProcessCosts(NamedTuple):
    """What is different where every device has a process of its own."""

    together: dict[int, Curve]  # passes while so many processes do them
    step: dict[int, float]  # what a step needs besides, by number of processes
    link: Link = NO_LINK  # for gradients
    cut_link: Link = NO_LINK  # for activations
    shared: Curve | None = None  # passes of two that share layers in slices
    start: float = 0.0  # seconds until all of them are connected

    def applied_to(self, profile: Profile) -> Profile:
        """What was measured with threads, with this instead where it differs."""
        sliced = profile.sliced
        if sliced is not None and self.shared is not None:
            sliced = sliced._replace(shared=self.shared)
        return replace(
            profile,
            together=self.together,
            step=curve_of([*profile.step.points[:1], *self.step.items()]),
            link=self.link,
            cut_link=self.cut_link,
            sliced=sliced,
            engine="processes",
            start=self.start,
        )


class Asked(NamedTuple):
    """What a worker process measures."""

    config: RunConfig
    prepared: Prepared
    sizes: Sequence[int]  # of shards
    seconds: float


class ProcessMeasurement:
    """The measurement of one model in worker processes."""

    def __init__(
        self,
        config: RunConfig,
        objects: UserObjects | None,
        sizes: Sequence[int],
        seconds: float,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._objects = replace(config, engine="processes"), objects
        self._sizes, self._seconds, self._log = sizes, seconds, log

    def costs(self, devices: Sequence[str]) -> ProcessCosts:
        """One process, two, and one for each device at the same time."""
        numbers, costs = sorted({1, min(2, len(devices)), len(devices)}), ProcessCosts({}, {})
        for number in numbers:
            self._log(f"measuring {number} process{'es' * (number > 1)}")
            began = time.monotonic()
            found = self._in_workers(_together, self._seconds / len(numbers), devices=",".join(devices[:number]))
            costs.step[number] = found["rest"]
            if number > 1:
                costs.together[number] = curve_of(found["passes"])
                costs = costs._replace(link=Link(*found["link"]), cut_link=Link(*found["cut_link"]))
            costs = costs._replace(start=found["began"] - began)
        return costs

    def with_slices(self, costs: ProcessCosts, pair: Sequence[str]) -> ProcessCosts:
        """The same with layers in slices, which two processes share; nothing, where they cannot be."""
        self._log("measuring layers in slices in two processes")
        how = {"devices": ",".join(pair), "num_slices": self._config.num_slices or DEFAULT_SLICES, "split": "layers=2"}
        with suppress(ConfigError):
            return costs._replace(shared=curve_of(self._in_workers(_sliced, self._seconds / 3, **how)))
        return costs

    def _in_workers(self, work: Callable[[Asked, Member], Any], seconds: float, **settings: Any) -> Any:
        config = replace(self._config, **settings)
        num_shards = max(config.num_shards, len(str(config.devices).split(",")))
        prepared = prepare(replace(config, num_shards=num_shards), self._objects)
        with cannot_be_measured():
            return in_workers(config, prepared, partial(work, Asked(config, prepared, self._sizes, seconds)))


def _together(asked: Asked, member: Member) -> dict[str, Any]:
    """The same shards in all processes at the same time, and what they send each other."""
    began, number = time.monotonic(), member.engine.num_ranks
    with closing(asked.prepared.task.train_set(member.engine)) as source:
        probe = _probe(asked, member, source)
        steps = _sampler(asked, member).by_size(probe, 1.0, at_most=-(-asked.config.batch_size // number))
        entries = len(probe.replicas[0].entries)
    found: dict[str, Any] = {
        "began": began,
        "passes": [[size, typical(timed, ForwardBackward)] for size, timed in steps.items()],
        "rest": rest_of(steps[min(steps)]),
    }
    if number > 1:
        sent = max(MIN_ENTRIES, min(entries, int(BUCKET_MB * 250_000)) // number)
        for name, channel in (("link", GRADIENTS), ("cut_link", ACTIVATIONS)):
            latency, seconds = (_exchange(member, channel, number) for number in (1, sent))
            found[name] = [latency, 4 * sent / max(seconds - latency, 1e-9)]
        found["rest"] += max(0.0, _gather(member) - found["link"][0])  # results of all ranks; a latency is on the clock
    return found


def _sliced(asked: Asked, member: Member) -> list[list[float]]:
    with closing(asked.prepared.task.train_set(member.engine)) as source:
        steps = _sampler(asked, member).by_size(_probe(asked, member, source), 1.0)
    return [[size, typical(timed, ForwardBackward)] for size, timed in steps.items()]


def _probe(asked: Asked, member: Member, source: BatchSource) -> Probe:
    return Probe(asked.config, asked.prepared, member.engine, source, lambda: [member.transport()])


def _sampler(asked: Asked, member: Member) -> Sampler:
    """One that does the same in all processes."""

    def clock() -> float:
        member.check()
        return float(max(member.engine.all_gather([time.monotonic()])))

    return Sampler(asked.sizes, asked.config.batch_size, asked.seconds, clock)


def _exchange(member: Member, channel: str, num_entries: int) -> float:
    """Seconds until the vector of each of the first two ranks is with the other."""
    engine, transport, seconds = member.engine, member.transport(), list[float]()
    vector, memory = (engine.backend.zeros(num_entries, engine.device) for _ in range(2))
    member.check()
    engine.all_gather([None])
    for number in range(TIMES) if engine.rank < 2 else ():
        key, other, began = GroupKey(channel, number, 0), 1 - engine.rank, time.perf_counter()
        is_cut = channel == ACTIVATIONS
        sent, received = (StageTensors([vector]), None) if is_cut else (vector, memory)
        transport.start(TransferGroup(key, [(other, sent)], [(other, received)]))
        transport.finish(key)
        engine.backend.synchronize(engine.device)
        seconds.append(time.perf_counter() - began)
    return float(max(engine.all_gather([median(seconds[1:]) if seconds else 0.0])))


def _gather(member: Member) -> float:
    """Seconds that ranks need to tell each other what a step left besides gradients."""
    transport, seconds = member.transport(), list[float]()
    member.engine.all_gather([None])
    for _ in range(TIMES):
        began = time.perf_counter()
        transport.all_gather(RankResult([0.0], [], [], 0.0, []))()
        seconds.append(time.perf_counter() - began)
    return float(max(member.engine.all_gather([median(seconds)])))
