"""A trace as Chrome and Perfetto read it: processes and rows have names, and a row's spans do not overlap."""

from lockstep.core.chrome_trace import RankSpans, chrome_trace
from lockstep.core.tracing import Span


def rows(events):
    return [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]


def spans(events):
    return [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]


def test_a_trace_starts_at_zero_and_says_which_shard_and_stage():
    events = chrome_trace([RankSpans(0, "cpu:0", 0, [Span("forward", 1, 100.0, 100.5, 3, 1)])], {0: []})
    assert events[-1] == {
        "name": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 500000.0,
        "args": {"step": 1, "shard": 3, "stage": 1},
    }  # fmt: skip


def test_what_a_gpu_does_and_an_overlapped_exchange_are_rows_below_their_rank():
    computed, exchanged = [Span("backward", 1, 100.0, 100.5)], [Span("exchange", 1, 100.2, 100.3)]
    loop = [Span("step", 1, 99.9, 100.6)]
    ranks = [RankSpans(0, "cuda:0", 0, computed, exchanged, computed), RankSpans(1, "cuda:1", 0, computed)]
    events = chrome_trace(ranks, {0: loop})
    assert [name for _, _, name in rows(events)] == [
        "rank 0 (cuda:0)", "rank 0, on the GPU", "rank 0, overlapped exchange", "rank 1 (cuda:1)", "the training loop"
    ]  # fmt: skip
    assert (2, "exchange", 300000.0, 100000.0) in spans(events)


def test_every_process_has_a_name_and_rows_of_its_own():
    computed = [Span("backward", 1, 100.0, 100.5)]
    ranks = [RankSpans(0, "cpu:0", 0, computed), RankSpans(1, "cpu:1", 1, computed)]
    events = chrome_trace(ranks, {0: computed, 1: computed})
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 (cpu:0)", 1: "rank 1 (cpu:1)"}
    assert [(process, name) for process, _, name in rows(events)] == [
        (0, "rank 0 (cpu:0)"), (1, "rank 1 (cpu:1)"), (0, "the training loop"), (1, "the training loop")
    ]  # fmt: skip
    assert len({row for _, row, _ in rows(events)}) == 4


def test_ranks_that_share_a_process_share_its_name():
    ranks = [RankSpans(n, f"cpu:{n}", 0, [Span("update", 1, 0.0, 1.0)]) for n in range(3)]
    (name,) = [e["args"]["name"] for e in chrome_trace(ranks, {0: []}) if e["name"] == "process_name"]
    assert name == "ranks 0 to 2 (cpu:0, cpu:1, cpu:2)"
