"""Every schedule that is executed, proved without any framework; and the proof itself, which has to find mistakes."""

from dataclasses import replace

import pytest

from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.buckets import bucket_ranges
from lockstep.partition.ranks import split_over_ranks
from lockstep.schedules.exchanges import EXCHANGES, KEEPS_THE_TREE, NATIVE
from lockstep.schedules.instructions import Add, AllReduce, Communicate, RankProgram, Schedule, Update, Wait
from lockstep.schedules.proof import ScheduleError, one_thread_order, prove

ENTRIES = range(100)
ONE_BUCKET, BUCKETS = (ENTRIES,), bucket_ranges(ENTRIES, 140e-6, num_ranks=2)


def schedule_of(exchange, shards, buckets=ONE_BUCKET, **more):
    return data_parallel.__wrapped__(DataParallel(tuple(shards), ENTRIES, buckets, exchange, **more))


def brackets(start, stop):
    """The tree of some shards, from its definition: the left side is the largest power of two that leaves a rest."""
    if stop - start == 1:
        return start
    left = 1
    while 2 * left < stop - start:
        left *= 2
    return brackets(start, start + left), brackets(start + left, stop)


def shards_of(expression):
    return [expression] if isinstance(expression, int) else [n for side in expression for n in shards_of(side)]


def check(schedule, exchange):
    """Nobody can deadlock, and what is added is the tree: not what the proof takes for it, but its definition."""
    found = prove(schedule, exchange in KEEPS_THE_TREE)
    assert found
    for expression in found:
        if exchange in KEEPS_THE_TREE:
            assert expression == brackets(0, schedule.num_shards)
        else:
            assert sorted(shards_of(expression)) == list(range(schedule.num_shards))


@pytest.mark.parametrize("exchange", [*EXCHANGES, NATIVE])
@pytest.mark.parametrize("num_ranks", range(1, 18))
def test_every_rank_ends_with_the_tree_and_nobody_can_deadlock(exchange, num_ranks):
    for num_shards in range(1, 65):
        shards = split_over_ranks(num_shards, num_ranks)
        check(schedule_of(exchange, shards), exchange)


FEW_SHARDS = (*range(1, 20), 31, 32, 33, 63, 64)  # in the quick suite
ALL_SHARDS = pytest.param(range(1, 65), marks=pytest.mark.long)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("num_ranks", range(1, 18))
@pytest.mark.parametrize("nums_shards", [FEW_SHARDS, ALL_SHARDS], ids=len)
def test_neither_can_they_with_buckets_that_overlap(exchange, num_ranks, nums_shards):
    assert len(BUCKETS) == 3  # two may be started while one waits
    for num_shards in nums_shards:
        shards = split_over_ranks(num_shards, num_ranks)
        check(schedule_of(exchange, shards, BUCKETS), exchange)


UNEQUAL = [
    [range(0, 1), range(1, 8)],
    [range(0, 6), range(6, 7), range(7, 8)],
    [range(0, 0), range(0, 5), range(5, 8)],
    [range(0, 3), range(3, 3), range(3, 8), range(8, 8)],
]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("shards", UNEQUAL, ids=str)
@pytest.mark.parametrize("buckets", [ONE_BUCKET, BUCKETS], ids=len)
@pytest.mark.parametrize("more", [{}, {"together": True}, {"max_addends": 8}, {"max_addends": 3}], ids=str)
def test_any_assignment_of_shards_gives_the_same_tree(exchange, shards, buckets, more):
    check(schedule_of(exchange, shards, buckets, **more), exchange)


def test_part_of_a_model_is_proved_as_well():
    split = DataParallel((range(2), range(2, 4)), range(40, 100), (range(70, 100), range(40, 70)), "sharded")
    schedule = data_parallel(split)
    check(schedule, "sharded")
    for program in schedule.programs:
        assert sorted(entry for part in program.update[0].total for entry in part.entries) == list(range(40, 100))


def changed(schedule, rank, change):
    """The schedule with another exchange on one rank."""
    programs = list(schedule.programs)
    programs[rank] = programs[rank]._replace(exchange=tuple(change(list(programs[rank].exchange))))
    return replace(schedule, programs=tuple(programs))


@pytest.mark.parametrize("buckets", [ONE_BUCKET, BUCKETS], ids=len)
def test_additions_in_another_order_are_found(buckets):
    def swap(instructions):
        return [Add(i.total, i.parts[::-1]) if isinstance(i, Add) else i for i in instructions]

    with pytest.raises(ScheduleError, match="and the tree is"):
        prove(changed(schedule_of("sharded", split_over_ranks(8, 3), buckets), 1, swap))


def test_a_group_that_is_never_started_is_a_deadlock():
    def leave_out(instructions):
        first = next(i for i in instructions if isinstance(i, Communicate))
        return [i for i in instructions if i not in (first, Wait(first.number, first.round))]

    with pytest.raises(ScheduleError, match=r"deadlock|does not hold"):
        prove(changed(schedule_of("sharded", split_over_ranks(8, 2)), 1, leave_out))


def test_groups_that_ranks_start_in_another_order_are_a_deadlock():
    """As NCCL has it: the kernels of a rank's groups run one after the other."""

    def other_order(instructions):
        starts = [n for n, i in enumerate(instructions) if isinstance(i, Communicate) and i.round == 0]
        a, b = starts[:2]
        instructions[a], instructions[b] = instructions[b], instructions[a]
        return instructions

    with pytest.raises(ScheduleError, match=r"deadlock|does not hold"):
        prove(changed(schedule_of("sharded", [range(0, 2), range(2, 4)], BUCKETS, together=True), 1, other_order))


def test_several_all_reduces_have_to_come_in_the_same_order():
    def in_halves(programs):
        """Each rank's one all-reduce as two, of half the entries each; `reverses` says who begins with the second."""
        for program, reverses in programs:
            (whole,) = (i for i in program.exchange if isinstance(i, AllReduce))
            halves = []
            for entries in (ENTRIES[:50], ENTRIES[50:]):
                parts = tuple(part._replace(entries=entries) for part in whole.parts)
                halves.append(AllReduce(whole.total._replace(entries=entries), parts))
            others = [i for i in program.exchange if i is not whole]
            update = Update(tuple(half.total for half in halves))
            yield RankProgram(program.compute, (*others, *(halves[::-1] if reverses else halves)), (update,), ENTRIES)

    one = schedule_of(NATIVE, split_over_ranks(8, 2))
    same, other = (tuple(in_halves(zip(one.programs, who, strict=True))) for who in ((False, False), (False, True)))
    assert len(prove(Schedule(same, 8), keeps_tree=False)) == 4, "two on each rank"
    with pytest.raises(ScheduleError, match="deadlock"):
        prove(Schedule(other, 8), keeps_tree=False)


def test_a_value_that_is_not_sent_is_found():
    def other_value(instructions):
        return [
            i._replace(sends=tuple(send._replace(value=i.sends[0].value) for send in i.sends))
            if isinstance(i, Communicate)
            else i
            for i in instructions
        ]

    with pytest.raises(ScheduleError, match="does not send"):
        prove(changed(schedule_of("gather", split_over_ranks(8, 3)), 1, other_value))


@pytest.mark.parametrize("buckets", [ONE_BUCKET, BUCKETS], ids=len)
def test_one_thread_can_run_all_ranks(buckets):
    schedule = schedule_of("tree", split_over_ranks(8, 3), buckets)
    order = one_thread_order(schedule)
    for rank, program in enumerate(schedule.programs):
        assert [i for r, i in order if r == rank and i in program.exchange] == list(program.exchange)
    assert len(order) == sum(len(phase) for program in schedule.programs for phase in program[:3])
