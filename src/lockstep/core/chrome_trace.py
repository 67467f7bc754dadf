"""A trace as Chrome and Perfetto read it: a process for each process, a row for each rank, times in microseconds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.core.tracing import NONE, Span, with_waits


@dataclass(frozen=True)
class RankSpans:
    """What one rank did."""

    number: int
    device: str
    process: int  # that it is in: the number of its first rank
    spans: list[Span] = field(default_factory=list)
    exchange: list[Span] = field(default_factory=list)  # of the thread that exchanges while the rank computes
    on_device: list[Span] = field(default_factory=list)  # by the clock of the GPU


class Row(NamedTuple):
    """A row of the picture."""

    process: int
    name: str
    spans: Sequence[Span]


def rows_of(ranks: Sequence[RankSpans], hosts: dict[int, list[Span]]) -> list[Row]:
    """The rows that have spans: those of the ranks, and then the loops of the processes.

    What a GPU does is the row below its rank, and so is an exchange that overlaps with the rank's work.
    """
    found = []
    for rank in ranks:
        found.append(Row(rank.process, f"rank {rank.number} ({rank.device})", with_waits(rank.spans)))
        found.append(Row(rank.process, f"rank {rank.number}, on the GPU", rank.on_device))
        found.append(Row(rank.process, f"rank {rank.number}, overlapped exchange", rank.exchange))
    found += [Row(process, "the training loop", spans) for process, spans in hosts.items()]
    return [row for row in found if row.spans]


def chrome_trace(ranks: Sequence[RankSpans], hosts: dict[int, list[Span]]) -> list[dict[str, Any]]:
    """The events of the file: names of processes and rows, then the spans. `hosts` has the loops, by process."""
    rows = rows_of(ranks, hosts)
    start = min((one.start for row in rows for one in row.spans), default=0.0)
    found = [_name("process_name", process, 0, _process_name(ranks, process)) for process in hosts]
    for number, row in enumerate(rows):
        found.append(_name("thread_name", row.process, number, row.name))
        order = {"name": "thread_sort_index", "ph": "M", "pid": row.process, "tid": number}
        found.append({**order, "args": {"sort_index": number}})
    for number, row in enumerate(rows):
        for one in row.spans:
            place = {"name": str(one.name), "ph": "X", "pid": row.process, "tid": number}
            begins = round(1e6 * (one.start - start), 1)  # so that the end is not after the next one's start
            times = {"ts": begins, "dur": round(round(1e6 * (one.end - start), 1) - begins, 1)}
            found.append({**place, **times, "args": _arguments(one)})
    return found


def _name(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


def _process_name(ranks: Sequence[RankSpans], process: int) -> str:
    own = [rank for rank in ranks if rank.process == process]
    numbers = f"rank {own[0].number}" if len(own) == 1 else f"ranks {own[0].number} to {own[-1].number}"
    return f"{numbers} ({', '.join(dict.fromkeys(rank.device for rank in own))})"


def _arguments(one: Span) -> dict[str, int]:
    found = {"step": one.step, "shard": one.shard, "stage": one.stage}
    return {name: number for name, number in found.items() if number != NONE}
