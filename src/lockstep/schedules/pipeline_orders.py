"""In which order the ranks of a pipeline take shards forward and back through the stages that they hold.

Here 3 stages and 5 shards; numbers are forward passes of a shard, letters (a is shard 0) its backward passes:

    gpipe    0  1  2  3  4              a  b  c  d  e         all forward, then all back: all activations are alive
                0  1  2  3  4        a  b  c  d  e
                   0  1  2  3  4  a  b  c  d  e

    1f1b     0  1  2        a  3  b  4  c     d     e         a backward pass as soon as there is one: a rank has at
                0  1     a  2  b  3  c  4  d     e            most as many shards under way as there are stages from
                   0  a  1  b  2  c  3  d  4  e               it to the end

Both are idle for (P-1)/(S+P-1) of the time with P equal stages and S shards. Where a rank holds two stages (an early
one and a late one, `there and back`), its turns are found by going through the step on a clock.
"""

from collections import deque
from typing import NamedTuple

ORDERS = {
    "1f1b": "a backward pass as soon as there is one: fewest activations are kept",
    "gpipe": "all shards forward, then all back",
}
FORWARD, BACKWARD = "forward", "backward"
SECONDS = {FORWARD: 1, BACKWARD: 2}  # on the clock: a backward pass takes about twice as long


class Turn(NamedTuple):
    """A pass of a shard through a stage."""

    kind: str  # FORWARD or BACKWARD
    shard: int
    stage: int


def turns_of(order: str, stages: tuple[int, ...], place: int, shards: range) -> list[Turn]:
    """The turns of the rank at one place in a pipeline; `stages` are the places of all stages.

    >>> [turn[:2] for turn in turns_of("1f1b", (0, 1), 0, range(3))][:4]
    [('forward', 0), ('forward', 1), ('backward', 0), ('forward', 2)]
    """
    if order == "gpipe":
        own = [stage for stage, at in enumerate(stages) if at == place]
        forward = [Turn(FORWARD, shard, stage) for stage in own for shard in shards]
        return forward + [Turn(BACKWARD, shard, stage) for stage in reversed(own) for shard in shards]
    if len(set(stages)) < len(stages):
        return _on_a_clock(stages, shards)[place]
    num_ahead = min(len(stages) - place - 1, len(shards))
    turns = [Turn(FORWARD, shard, place) for shard in shards[:num_ahead]]
    for number, shard in enumerate(shards):
        if num_ahead + number < len(shards):
            turns.append(Turn(FORWARD, shards[num_ahead + number], place))
        turns.append(Turn(BACKWARD, shard, place))
    return turns


def max_in_flight(order: str, stages: tuple[int, ...], place: int, num_shards: int) -> int:
    """How many passes through stages at this place have gone forward and not come back, at most."""
    own = [stage for stage, at in enumerate(stages) if at == place]
    if order == "gpipe":
        return num_shards * len(own)
    return sum(min(_limit(stages, stage), num_shards) for stage in own)


def _limit(stages: tuple[int, ...], stage: int) -> int:
    """How many shards may have gone forward through a stage and not come back: one more where ranks have two stages.

    With that one, a rank that is done with a shard early has another to go on with.
    """
    return len(stages) - stage + (len(set(stages)) < len(stages))


def idle_share(order: str, stages: tuple[int, ...], num_shards: int) -> float:
    """The share of a step in which ranks wait for each other, if all have equal work and communication takes no time.

    >>> round(idle_share("1f1b", (0, 1), 8), 3), round(1 / (8 + 1), 3)
    (0.111, 0.111)
    """
    places = range(max(stages) + 1)
    left = [deque(turns_of(order, stages, place, range(num_shards))) for place in places]
    free = [0 for _ in places]  # when a rank has nothing to do
    done: dict[Turn | None, int] = {None: 0}  # when a pass is over
    while any(left):
        for place, turns in enumerate(left):
            while turns and (before := _before(turns[0], len(stages))) in done:
                turn = turns.popleft()
                free[place] = done[turn] = max(free[place], done[before]) + _seconds(turn, stages)
    work = sum(_seconds(turn, stages) for turn in done if turn is not None)
    return 1 - work / (len(places) * max(free))


def _before(turn: Turn, num_stages: int) -> Turn | None:
    """The pass that has to be over before this one."""
    if turn.kind == FORWARD:
        return Turn(FORWARD, turn.shard, turn.stage - 1) if turn.stage else None
    is_last = turn.stage == num_stages - 1
    return Turn(FORWARD if is_last else BACKWARD, turn.shard, turn.stage + (not is_last))


def _seconds(turn: Turn, stages: tuple[int, ...]) -> int:
    """Ranks have equal work, so a stage that a rank has for itself takes twice as long as one of two."""
    return SECONDS[turn.kind] * (2 if stages.count(stages[turn.stage]) == 1 else 1)


def _on_a_clock(stages: tuple[int, ...], shards: range) -> list[list[Turn]]:
    """The turns of all ranks: each does what it can, back before forward, and keeps to the limits of 1f1b."""
    num_stages, num_places = len(stages), max(stages) + 1
    turns: list[list[Turn]] = [[] for _ in range(num_places)]
    free = [0] * num_places  # when a rank has nothing to do
    done: dict[Turn, int] = {}  # when a pass is over
    next_of = {(kind, stage): 0 for kind in (FORWARD, BACKWARD) for stage in range(num_stages)}
    now, num_left = 0, 2 * num_stages * len(shards)

    def is_ready(turn: Turn) -> bool:
        is_full = next_of[FORWARD, turn.stage] - next_of[BACKWARD, turn.stage] >= _limit(stages, turn.stage)
        if turn.kind == FORWARD and is_full:
            return False
        before = _before(turn, num_stages)
        return before is None or done.get(before, now + 1) <= now

    while num_left:
        for place in range(num_places):
            if free[place] > now:
                continue
            own = [stage for stage in range(num_stages - 1, -1, -1) if stages[stage] == place]
            for kind, stage in [(BACKWARD, stage) for stage in own] + [(FORWARD, stage) for stage in own]:
                number = next_of[kind, stage]
                if number < len(shards) and is_ready(turn := Turn(kind, shards[number], stage)):
                    turns[place].append(turn)
                    next_of[kind, stage] += 1
                    free[place] = done[turn] = now + _seconds(turn, stages)
                    num_left -= 1
                    break
        now += 1
    return turns
