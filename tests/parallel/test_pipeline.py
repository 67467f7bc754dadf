"""The instructions of a rank in a pipeline, typed out."""

from lockstep.parallel.data import DataParallel
from lockstep.parallel.pipeline import Pipeline, pipeline_compute, pipeline_measure
from lockstep.schedules.instructions import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    Activation,
    ActivationGradient,
    Add,
    Backward,
    Communicate,
    Evaluate,
    Forward,
    Partial,
    Receive,
    Send,
    Wait,
)
from lockstep.schedules.reduction_tree import Node

ENTRIES = range(4)
TWO = Pipeline((0, 1), (0, 1))


def of_place(place, num_shards, pipeline=TWO, order="1f1b"):
    own = range(num_shards)
    data = DataParallel((own,), ENTRIES, (ENTRIES,))
    return pipeline_compute({place: data}, own, pipeline, place, order)


def test_the_first_of_two_stages():
    out = Communicate(0, 0, (Send(Activation(0, 0), 1),), (), ACTIVATIONS)
    back = Communicate(0, 0, (), (Receive(ActivationGradient(0, 0), 1),), ACTIVATION_GRADIENTS)
    assert of_place(0, 1) == [
        Forward(0, 0),
        out,
        back,
        Wait(0, 0, ACTIVATION_GRADIENTS),
        Wait(0, 0, ACTIVATIONS),
        Backward(0, 0, ENTRIES),
    ]


def test_the_last_of_two_stages():
    assert of_place(1, 1) == [
        Communicate(0, 0, (), (Receive(Activation(0, 0), 0),), ACTIVATIONS),
        Wait(0, 0, ACTIVATIONS),
        Forward(0, 1),
        Backward(0, 1, ENTRIES),
        Communicate(0, 0, (Send(ActivationGradient(0, 0), 0),), (), ACTIVATION_GRADIENTS),
        Wait(0, 0, ACTIVATION_GRADIENTS),
    ]


def test_leaves_are_added_as_soon_as_they_can_be():
    found = [i for i in of_place(1, 4) if isinstance(i, (Backward, Add))]

    def sum_of_two(first):
        parts = tuple(Partial(Node(first + n, 1), ENTRIES) for n in range(2))
        return Add(Partial(Node(first, 2), ENTRIES), parts)

    assert found == [
        Backward(0, 1, ENTRIES),
        Backward(1, 1, ENTRIES),
        sum_of_two(0),
        Backward(2, 1, ENTRIES),
        Backward(3, 1, ENTRIES),
    ]


def test_ranks_of_a_pipeline_may_have_any_numbers():
    pipeline = Pipeline((3, 5), (0, 1))
    (send,) = [send for i in of_place(0, 1, pipeline) if isinstance(i, Communicate) for send in i.sends]
    assert send.to == 5


def test_evaluation_goes_forward_only():
    assert pipeline_measure(range(2), TWO, 1) == [
        instruction
        for shard in range(2)
        for instruction in (
            Communicate(shard, 0, (), (Receive(Activation(shard, 0), 0),), ACTIVATIONS),
            Wait(shard, 0, ACTIVATIONS),
            Evaluate(shard, 1),
        )
    ]
    first = pipeline_measure(range(2), TWO, 0)
    assert [i for i in first if isinstance(i, Evaluate)] == [Evaluate(0, 0), Evaluate(1, 0)]
    assert first[-1] == Wait(1, 0, ACTIVATIONS)
