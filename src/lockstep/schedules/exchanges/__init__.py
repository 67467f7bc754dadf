"""Who sends what to whom, as plain data. No framework, no numpy."""

from collections.abc import Callable
from functools import cache

from lockstep.schedules.exchanges.gather import gather
from lockstep.schedules.exchanges.ring import ring
from lockstep.schedules.exchanges.collective import Schedule
from lockstep.schedules.exchanges.sharded import sharded
from lockstep.schedules.exchanges.tree import tree
from lockstep.core.registry import pick

EXCHANGES: dict[str, Callable[[list[range]], Schedule]] = {
    "gather": gather,
    "sharded": sharded,
    "tree": tree,
    "ring": ring,
}

NATIVE = "native"  # the framework's own all-reduce, which has no schedule of ours

KEEPS_THE_TREE = frozenset({"gather", "sharded", "tree"})  # the others add in an order that depends on k


@cache
def schedule_for(name: str, ranges: tuple[range, ...]) -> Schedule:
    """The schedule of the exchange called `name` when rank r has the shards `ranges[r]`."""
    return pick(EXCHANGES, name, "exchange")(list(ranges))
