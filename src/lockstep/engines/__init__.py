"""Who runs the ranks: `inprocess`, one process with a thread for each device."""

from lockstep.engines.engine import Batch, Engine, Gradients
from lockstep.engines.inprocess import InProcess

__all__ = ["ENGINES", "Batch", "Engine", "Gradients", "InProcess"]

ENGINES: dict[str, type[Engine]] = {"inprocess": InProcess}
