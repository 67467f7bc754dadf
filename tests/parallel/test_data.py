"""The schedule of a data-parallel step, typed out."""

from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.schedules.instructions import (
    Add,
    AllGather,
    AllReduce,
    Communicate,
    ForwardBackward,
    Partial,
    Receive,
    Send,
    Update,
    Wait,
    WaitForBackward,
)
from lockstep.schedules.reduction_tree import Node

ALL = range(8)


def compute(shard):
    return ForwardBackward(range(shard, shard + 1))


def node(first, num_leaves, entries=ALL):
    return Partial(Node(first, num_leaves), entries)


def test_one_rank_adds_leaves_as_soon_as_it_can_and_exchanges_nothing():
    (program,) = data_parallel(DataParallel((range(4),), ALL, (ALL,))).programs
    assert program.compute == (
        compute(0),
        compute(1),
        Add(node(0, 2), (node(0, 1), node(1, 1))),
        compute(2),
        compute(3),
        AllGather(),
    )
    assert program.exchange == (
        Add(node(2, 2), (node(2, 1), node(3, 1))),
        Add(node(0, 4), (node(0, 2), node(2, 2))),
    )
    assert program.update == (Update((node(0, 4),)),)


def test_two_ranks_with_the_exchange_gather():
    first, second = data_parallel(DataParallel((range(1), range(1, 2)), ALL, (ALL,), "gather")).programs
    assert first.exchange == (
        Communicate(0, 0, (), (Receive(node(1, 1), 1),)),
        Wait(0, 0),
        Add(node(0, 2), (node(0, 1), node(1, 1))),
        Communicate(0, 1, (Send(node(0, 2), 1),), ()),
        Wait(0, 1),
    )
    assert second.exchange == (
        Communicate(0, 0, (Send(node(1, 1), 0),), ()),
        Wait(0, 0),
        Communicate(0, 1, (), (Receive(node(0, 2), 0),)),
        Wait(0, 1),
    )


def test_buckets_are_exchanged_while_backward_goes_on():
    low, high = range(0, 4), range(4, 8)
    schedule = data_parallel(DataParallel((range(1), range(1, 2)), ALL, (high, low), "gather"))
    assert schedule.overlaps
    waits = [i for i in schedule.programs[1].exchange if isinstance(i, (WaitForBackward, Communicate))]
    assert waits[:3] == [
        WaitForBackward(node(1, 1, high)),
        Communicate(0, 0, (Send(node(1, 1, high), 0),), ()),
        WaitForBackward(node(1, 1, low)),
    ]
    assert schedule.programs[1].update == (Update((node(0, 2, low), node(0, 2, high))),)


def test_shards_that_go_through_the_model_together_are_one_instruction():
    (program,) = data_parallel(DataParallel((range(2),), ALL, (ALL,), together=True)).programs
    assert program.compute == (ForwardBackward(range(2)), AllGather())
    assert program.exchange == (Add(node(0, 2), (node(0, 1), node(1, 1))),)


def test_a_fused_addition_takes_several_leaves():
    (program,) = data_parallel(DataParallel((range(5),), ALL, (ALL,), max_addends=4)).programs
    assert program.exchange == (
        Add(node(0, 4), tuple(node(shard, 1) for shard in range(4))),
        Add(node(0, 5), (node(0, 4), node(4, 1))),
    )


def test_native_is_one_instruction_whatever_the_buckets():
    schedule = data_parallel(DataParallel((range(2), range(2, 2)), ALL, (range(4, 8), range(4)), "native"))
    assert not schedule.overlaps
    assert schedule.programs[0].exchange[-1] == AllReduce(node(0, 2), (node(0, 2),))
    assert schedule.programs[1].exchange == (AllReduce(node(0, 2), ()),)
