"""Splitting the network: each rank has a stage, and shards go through the stages as micro-batches of a pipeline.

What the second of three stages does for shard 0: receives the activation of the first, takes it forward, sends its own
on; receives the gradient of that, takes the shard back (a leaf of the tree, for the stage's parameters), and sends the
gradient of what it had received. In between it takes other shards forward and back (`schedules/pipeline_orders.py`).
A stage's leaves are added in the tree over shards, so its gradient has the bits of the whole network's.

Every cut has channels of its own for activations and for gradients, so one direction never waits for the other. A rank
may hold two stages, an early one and a late one, where that shares out memory better.
"""

from typing import NamedTuple

from lockstep.parallel.data import DataParallel, additions_after
from lockstep.schedules.instructions import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    Activation,
    ActivationGradient,
    Backward,
    Communicate,
    Evaluate,
    Forward,
    Instruction,
    Receive,
    Send,
    Wait,
)
from lockstep.schedules.pipeline_orders import FORWARD, turns_of


class Pipeline(NamedTuple):
    """The ranks of a pipeline, and who holds which stage."""

    ranks: tuple[int, ...]  # by place
    stages: tuple[int, ...]  # the place of each stage

    def rank_of(self, stage: int) -> int:
        """Who holds a stage."""
        return self.ranks[self.stages[stage]]

    def is_last(self, stage: int) -> bool:
        return stage == len(self.stages) - 1


def pipeline_compute(
    parts: dict[int, DataParallel], own: range, pipeline: Pipeline, place: int, order: str
) -> list[Instruction]:
    """What the rank at one place does with the shards of its pipeline; `parts` are its stages.

    Leaves are added as soon as they can be.
    """
    found: list[Instruction] = []
    sent: dict[int, list[Instruction]] = {stage: [] for stage in parts}  # waits for gradients that a stage has sent
    max_sent = 1
    if len(set(pipeline.stages)) < len(pipeline.stages):  # there and back: with fewer, two ranks wait for each other
        max_sent = len(pipeline.stages) if order == "1f1b" else len(own)
    for kind, shard, stage in turns_of(order, pipeline.stages, place, own):
        if kind == FORWARD:
            found += [*_arrival(pipeline, stage, shard), Forward(shard, stage), *_departure(pipeline, stage, shard)]
            continue
        if not pipeline.is_last(stage):  # its gradient comes when the activation has arrived: nobody waits for that
            receive = (Receive(ActivationGradient(shard, stage), pipeline.rank_of(stage + 1)),)
            found += [
                Communicate(shard, stage, (), receive, ACTIVATION_GRADIENTS),
                Wait(shard, stage, ACTIVATION_GRADIENTS),
                Wait(shard, stage, ACTIVATIONS),
            ]
        if len(sent[stage]) == max_sent:
            found.append(sent[stage].pop(0))
        found.append(Backward(shard, stage, parts[stage].entries))
        if stage > 0:
            send = (Send(ActivationGradient(shard, stage - 1), pipeline.rank_of(stage - 1)),)
            found.append(Communicate(shard, stage - 1, send, (), ACTIVATION_GRADIENTS))
            sent[stage].append(Wait(shard, stage - 1, ACTIVATION_GRADIENTS))
        found += additions_after(parts[stage], own, shard)
    return [*found, *(wait for waits in sent.values() for wait in waits)]


def pipeline_measure(own: range, pipeline: Pipeline, place: int) -> list[Instruction]:
    """What a rank does to evaluate some samples: forward only. What it sent is there when the next stage has it."""
    found: list[Instruction] = []
    sent: dict[int, Instruction] = {}
    stages = [stage for stage, at in enumerate(pipeline.stages) if at == place]
    for shard in own:
        for stage in stages:
            found += _arrival(pipeline, stage, shard)
            if stage in sent:
                found.append(sent.pop(stage))
            found += [Evaluate(shard, stage), *_departure(pipeline, stage, shard)]
            if not pipeline.is_last(stage):
                sent[stage] = Wait(shard, stage, ACTIVATIONS)
    return [*found, *sent.values()]


def _arrival(pipeline: Pipeline, stage: int, shard: int) -> list[Instruction]:
    """Receives what the stage before hands over."""
    if stage == 0:
        return []
    receive = (Receive(Activation(shard, stage - 1), pipeline.rank_of(stage - 1)),)
    return [Communicate(shard, stage - 1, (), receive, ACTIVATIONS), Wait(shard, stage - 1, ACTIVATIONS)]


def _departure(pipeline: Pipeline, stage: int, shard: int) -> list[Instruction]:
    """Sends what the next stage continues with."""
    if pipeline.is_last(stage):
        return []
    send = (Send(Activation(shard, stage), pipeline.rank_of(stage + 1)),)
    return [Communicate(shard, stage, send, (), ACTIVATIONS)]
