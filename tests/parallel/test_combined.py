"""Schedules of all splits and their products, proved without any framework; and mistakes in them, which are found."""

from dataclasses import replace
from itertools import product

import pytest

from lockstep.parallel.combined import ModelSplit, StageShape, combined, measurement
from lockstep.parallel.data import DataParallel, data_parallel
from lockstep.partition.grid import Grid
from lockstep.partition.ranks import split_over_ranks
from lockstep.schedules.instructions import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    PARAMETERS,
    Activation,
    AllGather,
    Backward,
    Communicate,
    Evaluate,
    Forward,
    ForwardBackward,
    GatherNorms,
    Parameters,
    Receive,
    Send,
    Update,
    Wait,
)
from lockstep.schedules.pipeline_orders import ORDERS, max_in_flight
from lockstep.schedules.proof import ScheduleError, one_thread_order, peak_activations, prove

SIZE = 6  # entries of a stage
THERE_AND_BACK = [(0, 1, 0), (0, 1, 0, 1), (0, 1, 2, 0), (0, 1, 2, 1, 0), (0, 1, 2, 3, 2, 1, 0)]


def split_of(grid, stages=None, order="1f1b", shares_update=False, norms=False, exchange="sharded", num_shards=4):
    """A step of a model whose stages have six entries each; those of a rank are one after the other."""
    stages = tuple(range(grid.network)) if stages is None else stages
    parts = []
    for part in range(grid.num_parts):
        own = [stage for stage, place in enumerate(stages) if place == grid.at(part).network]
        shapes = []
        for number, stage in enumerate(own):
            entries = range(SIZE * number, SIZE * (number + 1))
            bounds = [entries.start + round(SIZE * n / grid.data) for n in range(grid.data + 1)]
            owned = tuple(range(*bounds[n : n + 2]) for n in range(grid.data)) if shares_update else ()
            shapes.append(StageShape(stage, entries, owned))
        parts.append(tuple(shapes))
    shards = tuple(split_over_ranks(num_shards, grid.data))
    step = ModelSplit(grid, stages, tuple(parts), order, norms).step(shards, exchange, together=False)
    return combined.__wrapped__(step)


def brackets(start, stop):
    """The tree of some shards, from its definition: the left side is the largest power of two that leaves a rest."""
    if stop - start == 1:
        return start
    left = 1
    while 2 * left < stop - start:
        left *= 2
    return brackets(start, start + left), brackets(start + left, stop)


def check(schedule, num_totals=None):
    """Nobody can deadlock, nothing is received that nobody needs, and every sum is the tree's."""
    found = prove(schedule)
    assert num_totals is None or len(found) == num_totals
    tree = brackets(0, schedule.num_shards)
    assert found
    assert all(expression == tree for expression in found)


def most_in_flight(program):
    """Passes that have gone forward and not come back, in the order of the program."""
    number = most = 0
    for instruction in program.compute:
        number += isinstance(instruction, Forward) - isinstance(instruction, Backward)
        most = max(most, number)
    assert number == 0
    return most


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_stage_ends_with_the_tree_and_nobody_can_deadlock(order, num_stages):
    stages = tuple(range(num_stages))
    for num_shards in range(1, 33):
        schedule = split_of(Grid(network=num_stages), order=order, num_shards=num_shards)
        check(schedule, num_totals=num_stages)
        if num_stages > 1:
            for place, program in enumerate(schedule.programs):
                assert most_in_flight(program) <= max_in_flight(order, stages, place, num_shards)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", THERE_AND_BACK, ids=str)
def test_a_rank_may_hold_an_early_stage_and_a_late_one(order, stages):
    for num_shards in (1, 2, 3, 4, 5, 7, 8, 13, 16):
        schedule = split_of(Grid(network=max(stages) + 1), stages, order, num_shards=num_shards)
        check(schedule, num_totals=len(stages))
        peaks = peak_activations(schedule)
        assert peaks == [most_in_flight(program) for program in schedule.programs]
        assert all(peak <= max_in_flight(order, stages, n, num_shards) for n, peak in enumerate(peaks))


GRIDS = [
    Grid(data=2),
    Grid(data=4),
    Grid(data=2, network=2),
    Grid(data=3, network=2),
    Grid(data=2, network=4),
    Grid(layers=2),
    Grid(layers=8),
    Grid(data=2, layers=2),
    Grid(network=2, layers=2),
    Grid(network=3, layers=4),
    Grid(data=2, network=2, layers=2),
    Grid(data=3, network=4, layers=3),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shares_update", [False, True], ids=["all update all", "shared update"])
def test_products_of_splits_add_in_the_same_tree(grid, shares_update):
    for (order, exchange), num_shards in product(
        [("1f1b", "sharded"), ("gpipe", "tree"), ("1f1b", "gather")], (1, 2, 4, 5, 8, 13)
    ):
        norms = shares_update and num_shards % 2 == 0
        check(split_of(grid, None, order, shares_update, norms, exchange, num_shards))


@pytest.mark.parametrize("shares_update", [False, True])
def test_products_with_a_rank_that_holds_two_stages(shares_update):
    for num_shards, order in product((2, 5, 8), ORDERS):
        check(split_of(Grid(data=2, network=2), (0, 1, 0), order, shares_update, shares_update, num_shards=num_shards))


@pytest.mark.long
@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_layer_ranks", range(1, 9))
def test_stages_and_slices_together(num_stages, num_layer_ranks):
    for num_shards, order in product(range(1, 33), ORDERS):
        check(split_of(Grid(network=num_stages, layers=num_layer_ranks), order=order, num_shards=num_shards))


def test_where_only_the_data_is_split_it_is_the_data_parallel_schedule():
    shards = tuple(split_over_ranks(8, 3))
    found = split_of(Grid(data=3), num_shards=8)
    expected = data_parallel.__wrapped__(DataParallel(shards, range(SIZE), (range(SIZE),)))
    assert found.programs == expected.programs


def test_with_a_shared_update_a_rank_receives_parameters_and_no_total():
    schedule = split_of(Grid(data=2), shares_update=True)
    first, second = schedule.programs
    (update,) = [i for i in first.update if isinstance(i, Update)]
    assert [part.entries for part in update.total] == [range(3)]
    low, high = Parameters(range(3)), Parameters(range(3, 6))
    assert first.update[1:] == (
        Communicate(0, 0, (Send(low, 1),), (Receive(high, 1),), PARAMETERS),
        Wait(0, 0, PARAMETERS),
    )
    assert second.update[1].sends == (Send(high, 0),)
    sent = [send.value.entries for i in first.exchange if isinstance(i, Communicate) for send in i.sends]
    assert sent == [range(3, 6)], "only what the other owns"


def test_a_rank_that_owns_nothing_still_gets_everything():
    shape = StageShape(0, range(SIZE), (range(SIZE), range(0), range(0)))
    step = ModelSplit(Grid(data=3), (0,), ((shape,),), "1f1b", True).step(
        tuple(split_over_ranks(6, 3)), "sharded", False
    )
    schedule = combined.__wrapped__(step)
    assert len(prove(schedule)) == 1
    assert schedule.programs[2].update[1] == Update(())


# --- evaluation


@pytest.mark.parametrize("grid", [Grid(network=3), Grid(data=2, network=2), Grid(network=2, layers=2)], ids=str)
@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_samples_go_through_all_stages_to_be_evaluated_and_nobody_can_deadlock(grid, num_batches):
    stages = tuple(range(grid.network))
    schedule = measurement.__wrapped__(grid, stages, tuple(split_over_ranks(num_batches, grid.data)))
    order = one_thread_order(schedule)
    for rank in range(grid.num_ranks):
        at = grid.at(rank)
        own = split_over_ranks(num_batches, grid.data)[at.data]
        assert [i for r, i in order if r == rank and isinstance(i, Evaluate)] == [Evaluate(n, at.network) for n in own]
    last = [r for r, i in order if isinstance(i, Evaluate) and i.stage == grid.network - 1]
    assert {rank for rank in last if grid.at(rank).layers == 0} <= set(schedule.ranks_with_losses())


def test_there_and_back_can_be_evaluated():
    schedule = measurement.__wrapped__(Grid(network=2), (0, 1, 0), (range(5),))
    assert sum(isinstance(i, Evaluate) for _, i in one_thread_order(schedule)) == 15
    assert schedule.ranks_with_losses() == [0]


# --- mistakes


def changed(schedule, rank, change, phase="compute"):
    """The schedule with another phase on one rank."""
    programs = list(schedule.programs)
    programs[rank] = programs[rank]._replace(**{phase: tuple(change(list(getattr(programs[rank], phase))))})
    return replace(schedule, programs=tuple(programs))


PIPELINE = split_of(Grid(network=3))


def test_an_activation_that_is_never_sent_is_found():
    def leave_out(instructions):
        sent = Activation(1, 1)
        return [
            i
            for i in instructions
            if not (isinstance(i, Communicate) and any(send.value == sent for send in i.sends))
            and i != Wait(1, 1, ACTIVATIONS)
        ]

    with pytest.raises(ScheduleError, match="deadlock"):
        prove(changed(PIPELINE, 1, leave_out))


def test_another_activation_than_the_one_that_is_waited_for_is_found():
    def other_shard(instructions):
        return [
            i._replace(sends=(Send(Activation(0, 0), i.sends[0].to),))
            if isinstance(i, Communicate) and i.sends and i.sends[0].value == Activation(1, 0)
            else i
            for i in instructions
        ]

    with pytest.raises(ScheduleError, match="does not send"):
        prove(changed(PIPELINE, 0, other_shard))


def test_a_backward_pass_before_its_forward_pass_is_found():
    def swap(instructions):
        forward, back = (instructions.index(i) for i in (Forward(0, 2), Backward(0, 2, range(SIZE))))
        instructions[forward], instructions[back] = instructions[back], instructions[forward]
        return instructions

    with pytest.raises(ScheduleError, match="takes shard 0 back before it went forward"):
        prove(changed(PIPELINE, 2, swap))


def test_a_backward_pass_without_the_gradient_of_what_it_handed_over_is_found():
    def leave_out(instructions):
        return [
            i for i in instructions if not (isinstance(i, (Communicate, Wait)) and i.channel == ACTIVATION_GRADIENTS)
        ]

    with pytest.raises(ScheduleError, match=r"deadlock|does not hold"):
        prove(changed(PIPELINE, 0, leave_out))


def test_a_shard_that_never_comes_back_is_found():
    def leave_out(instructions):
        return [i for i in instructions if not (isinstance(i, Backward) and i.shard == 3)]

    with pytest.raises(ScheduleError, match=r"does not hold|deadlock"):
        prove(changed(PIPELINE, 2, leave_out))


def test_an_activation_that_nobody_needs_is_found():
    """The second rank sends its activation to the first one as well, which has no use for it."""
    extra = Activation(0, 1)

    def send(instructions):
        at = instructions.index(Forward(0, 1)) + 1
        return [*instructions[:at], Communicate(9, 7, (Send(extra, 0),), (), ACTIVATIONS), *instructions[at:]]

    def receive(instructions):
        group = Communicate(9, 7, (), (Receive(extra, 1),), ACTIVATIONS)
        return [*instructions[:-1], group, Wait(9, 7, ACTIVATIONS), instructions[-1]]

    with pytest.raises(ScheduleError, match=r"rank 0 receives .*, and does not need it"):
        prove(changed(changed(PIPELINE, 1, send), 0, receive))


def test_a_gradient_of_another_part_of_the_model_is_found():
    """Stages have as many entries as each other: the vectors could be added."""
    schedule = split_of(Grid(data=2, network=2), num_shards=2)

    def other_part(rank, other):
        def change(instructions):
            return [
                i._replace(
                    sends=tuple(send._replace(to=other) for send in i.sends),
                    receives=tuple(receive._replace(source=other) for receive in i.receives),
                )
                if isinstance(i, Communicate)
                else i
                for i in instructions
            ]

        return lambda found: changed(found, rank, change, "exchange")

    for rank, other in ((0, 3), (3, 0), (1, 2), (2, 1)):
        schedule = other_part(rank, other)(schedule)
    with pytest.raises(ScheduleError, match="holds another part of the model"):
        prove(schedule)


def test_parameters_that_are_handed_out_before_they_are_updated_are_found():
    def first(instructions):
        return [*instructions[1:], instructions[0]]

    with pytest.raises(ScheduleError, match="before it has updated them"):
        prove(changed(split_of(Grid(data=2), shares_update=True), 1, first, "update"))


def test_parameters_that_are_not_handed_out_are_found():
    schedule = split_of(Grid(data=2), shares_update=True)
    for rank in range(2):
        schedule = changed(schedule, rank, lambda instructions: instructions[:1], "update")
    with pytest.raises(ScheduleError, match="does not cover the vector"):
        prove(schedule)


def test_ranks_that_share_layers_have_to_take_shards_in_the_same_order():
    def other_order(instructions):
        first, second = (n for n, i in enumerate(instructions) if isinstance(i, ForwardBackward) and i.shards.start < 2)
        instructions[first], instructions[second] = instructions[second], instructions[first]
        return instructions

    with pytest.raises(ScheduleError, match="deadlock"):
        prove(changed(split_of(Grid(layers=2)), 1, other_order))


@pytest.mark.parametrize("kind", [AllGather, GatherNorms])
def test_a_collective_that_one_rank_leaves_out_is_a_deadlock(kind):
    schedule = split_of(Grid(data=2), shares_update=True, norms=True)
    phase = "compute" if kind is AllGather else "update"
    with pytest.raises(ScheduleError, match="deadlock"):
        prove(changed(schedule, 1, lambda found: [i for i in found if not isinstance(i, kind)], phase))
