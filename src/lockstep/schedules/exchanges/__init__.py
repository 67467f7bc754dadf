"""All-reduce algorithms by name: a file each, a function from "who has which shards" to who sends what to whom."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from lockstep.core.registry import pick
from lockstep.schedules.exchanges.collective import Collective
from lockstep.schedules.exchanges.gather import gather
from lockstep.schedules.exchanges.ring import ring
from lockstep.schedules.exchanges.sharded import sharded
from lockstep.schedules.exchanges.tree import tree

EXCHANGES: dict[str, Callable[[Sequence[range]], Collective]] = {
    "gather": gather,
    "sharded": sharded,
    "tree": tree,
    "ring": ring,
}

NATIVE = "native"  # the framework's own all-reduce: one instruction, `AllReduce`

KEEPS_THE_TREE = frozenset({"gather", "sharded", "tree"})  # the others add in an order that depends on k


@lru_cache(maxsize=256)
def collective_for(name: str, ranges: tuple[range, ...]) -> Collective:
    """The all-reduce called `name` when rank r has the shards `ranges[r]`."""
    collective = pick(EXCHANGES, name, "exchange")(ranges)
    return collective._replace(rounds=tuple(r for r in collective.rounds if r.transfers or r.additions))
