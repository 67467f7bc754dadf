"""A schedule as boxes of a picture: what each rank does from when to when, if every pass takes as long as is said."""

from collections.abc import Hashable
from typing import NamedTuple

from lockstep.report.schedule_picture import BACKWARD, FORWARD, UPDATE, Box
from lockstep.schedules.clock import Link, run_on_clock
from lockstep.schedules.instructions import Schedule, Value


class Costs(NamedTuple):
    """Seconds on the clock. Additions take none."""

    forward_seconds: float = 1
    backward_seconds: float = 2
    update_seconds: float = 0
    communication: float = 0  # from where a value is sent until it is there
    stages: tuple[float, ...] = ()  # how many times as long each stage takes; empty: all take the same

    def forward(self, rank: int, shard: int, stage: int) -> float:
        return self.forward_seconds * (self.stages[stage] if self.stages else 1)

    def backward(self, rank: int, shard: int, stage: int) -> float:
        return self.backward_seconds * (self.stages[stage] if self.stages else 1)

    def update(self, rank: int, num_entries: int) -> float:
        return self.update_seconds

    def add(self, rank: int, num_entries: int) -> float:
        return 0.0

    def num_bytes(self, value: Value) -> int:
        return 0

    def link(self, rank: int, value: Value | None = None) -> Link:
        return Link(latency=self.communication)

    def hardware(self, rank: int) -> Hashable:
        return rank

    def slowdown(self, kind: str, num_active: int) -> float:
        return 1.0


def timeline(schedule: Schedule, costs: Costs | None = None) -> list[Box]:
    """The passes of all ranks, each as early as it can be."""
    kinds = (FORWARD, BACKWARD, UPDATE)
    spans = run_on_clock(schedule, costs or Costs()).spans
    return sorted((Box(*span) for span in spans if span.kind in kinds), key=lambda box: (box.start, box.rank))
