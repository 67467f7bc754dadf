"""The steps of a trace in seconds: of each step, what the rank did that all others waited for.

All ranks take the same time from step to step. In each step one of them, the critical rank, has its gradients last; it
waits for no other rank, so its own timeline is the step: loading, launch, its passes, exchange, update, and the host.
Only durations are compared, never moments: machines have different clocks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.core.chrome_trace import RankSpans
from lockstep.core.tracing import NONE, Span, SpanName

PASSES = (SpanName.DATA, SpanName.FORWARD, SpanName.BACKWARD, SpanName.COMPUTE)


@dataclass(frozen=True)
class References:
    """What was measured after the run, without updates: the same passes, when no other rank works."""

    alone: dict[int, float]  # samples -> seconds of one shard of so many, on one device while the others are idle
    together: float  # seconds of all passes of a step as it was, over all ranks
    slowdown: float  # a shard takes so many times as long while all ranks work


@dataclass(frozen=True)
class TracedRun:
    """What a run has left to explain it by."""

    ranks: Sequence[RankSpans]
    hosts: dict[int, list[Span]]  # the loop of each process
    num_samples: dict[int, int]  # of each step
    num_shards: int
    parts: Sequence[int]  # the part of the model that each rank holds; all 0 where every rank has the whole
    divides_update: bool = False  # whether ranks update different parameters
    runs_ahead: bool = False  # the host starts steps before the device has done those before (CUDA graphs)
    references: References | None = None
    settings: dict[str, object] = field(default_factory=dict)  # of the run, by the names of options


class RankStep(NamedTuple):
    """One step of one rank, in seconds."""

    loading: float  # of its process
    passes: float  # forward and backward of its shards
    adds: float  # what else it did between them: additions
    idle: float  # between its passes
    exchange: float  # from its last pass to the update, and in between
    update: float
    host: float  # what is left: launch, threads, the loop
    num_shards: int

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.loading + self.passes + self.adds + self.idle + self.exchange + self.update + self.host

    @property
    def work(self) -> float:
        """Until its gradients are ready, if it never waits."""
        return self.loading + self.passes + self.adds


class HostStep(NamedTuple):
    """One step of one process."""

    seconds: float  # since the step before
    loading: float


def counted_steps(run: TracedRun) -> list[int]:
    """The steps that were traced on every rank, without the first, which loads kernels, and those with a capture."""
    steps = set(run.num_samples)
    for spans in run.hosts.values():
        steps &= {one.step for one in spans if one.name == SpanName.STEP}
        steps -= {one.step for one in spans if one.name == SpanName.CAPTURE}
    if not run.runs_ahead:
        for rank in run.ranks:
            steps &= {one.step for one in rank.spans if one.name == SpanName.UPDATE}
    found = sorted(steps)
    first = min(run.num_samples, default=0)
    return [step for step in found if step != first] or found


def host_steps(spans: Sequence[Span]) -> dict[int, HostStep]:
    """The steps of a process: from the end of one to the end of the next; after an evaluation, from its first batch."""
    found: dict[int, HostStep] = {}
    began: float | None = None
    loading = 0.0
    for one in sorted(spans, key=lambda span: span.end):
        if one.name == SpanName.EVALUATION:
            began = None
        elif one.name == SpanName.LOADING:
            loading += one.seconds
            began = one.start if began is None else began
        elif one.name in (SpanName.STEP, SpanName.CAPTURE):
            before = found.get(one.step, HostStep(0.0, 0.0))  # it is started, and waited for
            start = one.start if began is None else began
            found[one.step] = HostStep(before.seconds + one.end - start, before.loading + loading)
            began, loading = one.end, 0.0
    return found


def seconds_of_passes(spans: Sequence[Span]) -> tuple[float, float, int]:
    """Of the passes of shards, of what is done between them, and how many shards there are.

    The shards of a CUDA graph cannot be told apart: they count as one.
    """
    passes = sum(one.seconds for one in spans if one.name in PASSES and one.shard != NONE)
    others = sum(one.seconds for one in spans if one.name in PASSES and one.shard == NONE)
    num_shards = len({one.shard for one in spans if one.shard != NONE})
    return (passes, others, num_shards) if num_shards else (others, 0.0, 1)


def rank_step(spans: Sequence[Span], host: HostStep) -> RankStep:
    """What a rank's spans of one step come to."""
    passes, adds, num_shards = seconds_of_passes(spans)
    update = sum(one.seconds for one in spans if one.name == SpanName.UPDATE)
    start, end = min(one.start for one in spans), max(one.end for one in spans)
    computed = max((one.end for one in spans if one.name in PASSES), default=start)
    return RankStep(
        loading=host.loading,
        passes=passes,
        adds=adds,
        idle=computed - start - passes - adds,
        exchange=end - computed - update,
        update=update,
        host=host.seconds - host.loading - (end - start),
        num_shards=num_shards,
    )


def steps_of(run: TracedRun) -> dict[int, list[RankStep]]:
    """Every counted step, with all ranks."""
    counted = counted_steps(run)
    hosts = {process: host_steps(spans) for process, spans in run.hosts.items()}
    found: dict[int, list[RankStep]] = {step: [] for step in counted}
    for rank in run.ranks:
        spans = spans_by_step(rank.spans)
        for step in counted:
            found[step].append(rank_step(spans[step], hosts[rank.process][step]))
    return found


def spans_by_step(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """The spans of each step."""
    found: dict[int, list[Span]] = {}
    for one in spans:
        found.setdefault(one.step, []).append(one)
    return found


def critical_rank(ranks: Sequence[RankStep]) -> int:
    """The rank whose gradients are ready last."""
    return max(range(len(ranks)), key=lambda rank: ranks[rank].work)


def pipeline_seconds(ranks: Sequence[Sequence[Span]]) -> float:
    """How long the passes of a step take if each begins as soon as its rank is free and its input is there.

    The passes are those that were measured, in the order in which each rank did them. Nothing takes time in between.
    """
    waiting = [[one for one in spans if one.name in PASSES] for spans in ranks]
    now, done = [0.0 for _ in ranks], dict[tuple[str, int, int], float]()
    last_stage = max((one.stage for spans in waiting for one in spans), default=NONE)
    remaining = Counter((one.name, one.shard, one.stage) for spans in waiting for one in spans)
    progressed = True
    while progressed:
        progressed = False
        for rank, spans in enumerate(waiting):
            while spans and (ready := _ready(spans[0], done, remaining, last_stage)) is not None:
                one = spans.pop(0)
                now[rank] = max(now[rank], ready) + one.seconds
                key = one.name, one.shard, one.stage
                remaining[key] -= 1
                done[key] = now[rank]
                progressed = True
    return max(now, default=0.0)


def _ready(
    one: Span, done: dict[tuple[str, int, int], float], remaining: dict[tuple[str, int, int], int], last_stage: int
) -> float | None:
    """When the input of a pass is there; None: not yet."""
    before = None
    if one.name == SpanName.FORWARD and one.stage > 0:
        before = (str(SpanName.FORWARD), one.shard, one.stage - 1)
    elif one.name == SpanName.BACKWARD and 0 <= one.stage < last_stage:
        before = (str(SpanName.BACKWARD), one.shard, one.stage + 1)
    if before is None or before not in remaining:
        return 0.0
    return done[before] if remaining[before] == 0 else None
