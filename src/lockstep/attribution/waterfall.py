"""Where the time of a step went: a waterfall in milliseconds, from a perfect speed-up to what was measured."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple, Self

from lockstep.attribution.advice import Case, advice_for
from lockstep.attribution.step_times import (
    RankStep,
    TracedRun,
    counted_steps,
    critical_rank,
    host_steps,
    pipeline_seconds,
    spans_by_step,
    steps_of,
)
from lockstep.attribution.what_if import MakeSchedule, WhatIf
from lockstep.core.torchrun_env import torchrun_env
from lockstep.core.tracing import SpanName
from lockstep.report.waterfall_text import waterfall_lines

PARTS = (
    "loading",
    "launch and host",
    "smaller shards",
    "exposed exchange",
    "waiting for the slower rank",
    "bubble",
    "shared hardware",
    "update",
    "evaluation",
)
STRAGGLES = 1.1  # times as long for a shard as the others, in most steps
MOST, FEW_STEPS = 0.75, 5


@dataclass(frozen=True)
class Straggler:
    """A rank that the others waited for, step after step."""

    rank: int
    device: str
    times_as_long: float  # for a shard, as the others
    lost_ms: float  # of a step

    def sentence(self) -> str:
        """Who it is, and what it costs."""
        return (
            f"rank {self.rank} ({self.device}) takes {self.times_as_long:.2f} times as long for a shard as the others "
            f"do: {self.lost_ms:.2f} ms of every step"
        )


@dataclass(frozen=True, repr=False)
class Explanation:
    """Where the time of a step went; it shows itself as a waterfall. `perfect_ms`, parts and rest are `step_ms`."""

    step_ms: float  # of training and evaluation together, mean over the steps that were counted
    perfect_ms: float  # if k devices were k times as fast as one that has nothing else to do
    parts: dict[str, float]  # milliseconds by name, those of `PARTS`
    rest_ms: float
    advice: str  # what to change first
    num_devices: int = 1
    num_steps: int = 0  # that were counted
    straggler: Straggler | None = None
    notes: list[str] = field(default_factory=list)  # what could not be measured

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """From what `summary` gave."""
        straggler = plain.get("straggler")
        return cls(**{**plain, "straggler": Straggler(**straggler) if straggler else None})

    def plain(self) -> dict[str, Any]:
        """What `lockstep explain --json` prints."""
        names = ("step_ms", "perfect_ms", "parts", "rest_ms", "advice")
        return {name: getattr(self, name) for name in names}

    def summary(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def lines(self, width: int | None = None) -> list[str]:
        """The waterfall as text, its bars as wide as `width` has room for."""
        said = [self.straggler.sentence()] if self.straggler else []
        return [*waterfall_lines(self.summary(), width), *self.notes, *said, self.advice]

    def sentence(self) -> str:
        """What it comes to."""
        lost = sorted(self.parts.items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} {ms:.2f} ms" for name, ms in lost if ms >= 0.005 * self.step_ms) or "nothing"
        k = self.num_devices
        ideal = "one device and nothing else" if k == 1 else f"{k} times as fast as one device"
        said = [f"a step took {self.step_ms:.2f} ms; {ideal}: {self.perfect_ms:.2f} ms; lost to: {named}"]
        said += [self.straggler.sentence()] if self.straggler else []
        return "; ".join(said) + f". {self.advice}"

    def __repr__(self) -> str:
        return "\n".join(self.lines())


class Attribution(NamedTuple):
    """A step in seconds: what each part took, and what the passes of a perfect step would."""

    step: float
    perfect: float
    parts: dict[str, float]


def explain_run(run: TracedRun, make_schedule: MakeSchedule | None = None) -> Explanation | None:
    """The explanation of a traced run; None where no step was traced. Advice is tried out on other schedules."""
    counted = counted_steps(run)
    if not counted:
        return None
    found = _of_graphs(run, counted) if run.runs_ahead else _of_ranks(run)
    evaluation = _evaluation(run, counted)
    parts = {name: 1e3 * found.parts.get(name, 0.0) for name in PARTS} | {"evaluation": 1e3 * evaluation}
    step, perfect = 1e3 * (found.step + evaluation), 1e3 * found.perfect
    rounded = {name: round(ms, 4) for name, ms in parts.items()}
    rest = round(round(step, 4) - round(perfect, 4) - sum(rounded.values()), 4)
    straggler = None if run.runs_ahead else _straggler(run, parts["waiting for the slower rank"])
    case = Case(
        step_ms=step,
        parts=parts,
        settings=dict(run.settings),
        num_devices=len(run.ranks),
        num_shards=run.num_shards,
        what_if=None if run.runs_ahead or make_schedule is None else WhatIf(run, make_schedule),
        straggler=straggler.sentence() if straggler else "",
        num_here=env.local_size if (env := torchrun_env()) else len(run.ranks),
        num_cores=os.cpu_count() or 0,  # of the machine: a rank may be pinned to one of them
    )
    return Explanation(
        step_ms=round(step, 4),
        perfect_ms=round(perfect, 4),
        parts=rounded,
        rest_ms=rest,
        advice=advice_for(case),
        num_devices=len(run.ranks),
        num_steps=len(counted),
        straggler=straggler,
        notes=_notes(run),
    )


def _notes(run: TracedRun) -> list[str]:
    if run.references is not None:
        return []
    return ["No device was measured alone: smaller shards and shared hardware are not told apart from other work."]


def _of_ranks(run: TracedRun) -> Attribution:
    """From the timelines of the ranks."""
    steps = steps_of(run)
    critical = {step: critical_rank(ranks) for step, ranks in steps.items()}
    own = [steps[step][rank] for step, rank in critical.items()]
    mean = {name: fmean(getattr(each, name) for each in own) for name in RankStep._fields}
    share = _share_of_passes(run, list(steps.values()))
    bubble = _bubble(run, {step: steps[step][rank] for step, rank in critical.items()})
    slowdown = run.references.slowdown if run.references else 1.0
    alone = share / slowdown  # its part of the batch on a device that nothing disturbs, in the shards that it has
    k, in_run = len(run.ranks), fmean(sum(rank.passes for rank in ranks) for ranks in steps.values())
    perfect = min([alone, *(seconds / k for seconds in _whole_batch(run, list(steps), in_run))])
    update, exchange = mean["update"], mean["idle"] + mean["exchange"]
    perfect_update = update if run.divides_update else update / k
    adds = mean["adds"] + (exchange if k == 1 else 0.0)  # one device has nobody to exchange with: these are additions
    parts = {
        "loading": mean["loading"],
        "launch and host": mean["host"],
        "smaller shards": alone - perfect + adds,
        "exposed exchange": exchange - bubble if k > 1 else 0.0,
        "waiting for the slower rank": max(0.0, mean["passes"] - share),
        "bubble": bubble,
        "shared hardware": share - alone,
        "update": update - perfect_update,
    }
    step = fmean(each.seconds for each in own)
    return Attribution(step, perfect + perfect_update, parts)


def _whole_batch(run: TracedRun, steps: Sequence[int], in_run: float) -> list[float]:
    """Seconds of a batch on one device, in shards of each size that was measured after the run.

    `in_run` are the seconds of all passes in a step; they took a little more or less time in the run.
    """
    if run.references is None or run.references.together <= 0:
        return []
    scale = in_run / run.references.together * fmean(run.num_samples[step] for step in steps)
    return [scale * seconds / size for size, seconds in run.references.alone.items()]


def _share_of_passes(run: TracedRun, steps: Sequence[Sequence[RankStep]]) -> float:
    """Seconds of a rank's passes, if all were as fast as the one that was fastest in a step, with equal shares.

    Only ranks that hold the same part of the model are compared.
    """
    ideal = []
    for part in sorted(set(run.parts)):
        same, seconds = _same(run, part), 0.0
        for step in steps:
            ranks = [step[rank] for rank in same if step[rank].num_shards]
            fastest = min((rank.passes / rank.num_shards for rank in ranks), default=0.0)
            seconds += fastest * sum(rank.num_shards for rank in ranks) / len(same)
        ideal.append(seconds / len(steps))
    return fmean(ideal)


def _same(run: TracedRun, part: int) -> list[int]:
    return [rank for rank, other in enumerate(run.parts) if other == part]


def _bubble(run: TracedRun, critical: dict[int, RankStep]) -> float:
    """What the critical rank of a pipeline has to wait at least, however fast values get from rank to rank; a mean."""
    if not any(one.stage > 0 for rank in run.ranks for one in rank.spans):
        return 0.0
    found, ranks = [], [spans_by_step(rank.spans) for rank in run.ranks]
    for step, own in critical.items():
        waits = pipeline_seconds([spans[step] for spans in ranks]) - own.passes - own.adds
        found.append(max(0.0, min(waits, own.idle + own.exchange)))
    return fmean(found)


def _of_graphs(run: TracedRun, counted: Sequence[int]) -> Attribution:
    """From the clock of a GPU that replays CUDA graphs while the host is ahead of it."""
    hosts = host_steps(next(iter(run.hosts.values())))
    step = fmean(hosts[number].seconds for number in counted)
    loading = fmean(hosts[number].loading for number in counted)
    spans = [one for one in run.ranks[0].on_device if one.step in set(counted)]
    passes, update = (
        sum(one.seconds for one in spans if one.name == name) / len(counted)
        for name in (SpanName.COMPUTE, SpanName.UPDATE)
    )
    k, idle = len(run.ranks), max(0.0, step - passes - update)
    perfect_update = update / k
    loading = min(loading, idle)  # the rest of it is hidden behind the device's work
    perfect = min([passes, *_whole_batch(run, counted, passes)])
    parts = {
        "loading": loading,
        "launch and host": idle - loading,
        "smaller shards": passes - perfect,
        "shared hardware": perfect - perfect / k,
        "update": update - perfect_update,
    }
    return Attribution(step, perfect / k + perfect_update, parts)


def _evaluation(run: TracedRun, counted: Sequence[int]) -> float:
    """Seconds of evaluation for each step: that of an epoch is shared out among its steps."""
    spans = next(iter(run.hosts.values()))
    evaluations = [one.seconds for one in spans if one.name == SpanName.EVALUATION]
    return sum(evaluations) / max(1, len(run.num_samples)) if counted else 0.0


def _straggler(run: TracedRun, lost_ms: float) -> Straggler | None:
    """The rank that was slowest in most steps, by how much."""
    steps = list(steps_of(run).values())
    times = [
        [step[rank].passes / step[rank].num_shards for step in steps if step[rank].num_shards]
        for rank in range(len(run.ranks))
    ]
    for part in sorted(set(run.parts)):
        same = [rank for rank in _same(run, part) if len(times[rank]) == len(steps)]
        if len(same) < 2 or len(steps) < FEW_STEPS:
            continue
        slowest = max(same, key=lambda rank: fmean(times[rank]))
        others = [rank for rank in same if rank != slowest]
        ratio = median(times[slowest]) / median(median(times[rank]) for rank in others)
        num_last = sum(times[slowest][at] > max(times[rank][at] for rank in others) for at in range(len(steps)))
        if ratio >= STRAGGLES and num_last >= MOST * len(steps):
            return Straggler(slowest, run.ranks[slowest].device, round(ratio, 3), round(lost_ms, 4))
    return None
