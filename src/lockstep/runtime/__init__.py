"""Who runs the ranks: `inprocess`, a thread for each device; `processes`, a process for each."""

from lockstep.runtime.engine import Batch, Engine, Exchanged, Gathered, Gradients, Leaf, Meet, Replica, Shard
from lockstep.runtime.inprocess import InProcess

__all__ = [
    "ENGINES",
    "Batch",
    "Engine",
    "Exchanged",
    "Gathered",
    "Gradients",
    "InProcess",
    "Leaf",
    "Meet",
    "Replica",
    "Shard",
]

ENGINES = {
    "inprocess": "one process, a thread for each device",
    "processes": "a process for each device, on this machine or, under torchrun, on several",
}
