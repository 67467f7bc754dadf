"""Who runs the ranks: `inprocess`, one process with a thread for each device."""

from lockstep.engines.engine import Batch, Engine, Gathered, Gradients, Leaf, Meet, Replica, Shard
from lockstep.engines.inprocess import InProcess

__all__ = ["ENGINES", "Batch", "Engine", "Gathered", "Gradients", "InProcess", "Leaf", "Meet", "Replica", "Shard"]

ENGINES: dict[str, type[Engine]] = {"inprocess": InProcess}
