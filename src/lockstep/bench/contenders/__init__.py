"""Who is measured: each in processes of its own (`python -m lockstep.bench.contenders`), which do as they are told.

A process says on standard output, as one line of JSON, that it is ready; for each line on its standard input it runs a
trial and says what came out. While others have their turn, it waits for the next line, and computes nothing.
"""

import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from lockstep.bench.work import Work

PEERS = "pip install 'lockstep[bench]'"


class Place(NamedTuple):
    """Which of a contender's processes this is, and where the others are met."""

    rank: int
    num_ranks: int
    device: str  # as this process sees it
    port: int  # of a store on this machine
    name: str  # of the contender's part of it


class Runner(Protocol):
    """A contender, in one of its processes."""

    def warm_up(self, **arguments: Any) -> dict[str, Any]:
        """Does what is done once, and says what it has chosen."""
        ...

    def run(self, **arguments: Any) -> dict[str, Any]:
        """One trial: the seconds it took, and the loss of its last step."""
        ...

    def close(self) -> None:
        """Standard input has ended."""
        ...


class Contender(NamedTuple):
    """One that can be measured."""

    maker: str  # module:function in this package, of (Work, Place)
    about: str
    packages: tuple[str, ...] = ()  # one of them must be there
    is_parallel: bool = False  # it has a process for each device
    is_own: bool = False  # it can `finish`, with weights that have to be the same for every number of devices

    def make(self, work: Work, place: Place) -> Runner:
        """Sets it up in this process."""
        module, _, function = self.maker.partition(":")
        maker: Callable[[Work, Place], Runner] = getattr(import_module(f"{__name__}.{module}"), function)
        return maker(work, place)

    def problem(self) -> str:
        """Why it cannot be had; nothing where it can."""
        if not self.packages or any(map(importlib.util.find_spec, self.packages)):
            return ""
        return f"not installed: {PEERS}"


OURS, ONE_DEVICE, ONE_SHARD = "lockstep", "lockstep-1-device", "lockstep-1-shard"
CONTENDERS = {
    OURS: Contender("ours:Ours", "the step of `lockstep train`", is_own=True),
    ONE_DEVICE: Contender("ours:one_device", "the same on the first device alone", is_own=True),
    ONE_SHARD: Contender("ours:one_shard", "the same without shards: what they cost", is_own=True),
    "text": Contender("text:text", "the text's program: replicas in one process, loader with 4 processes"),
    "text-in-memory": Contender("text:text_in_memory", "the same with its data in memory"),
    "ddp": Contender("ddp:ddp", "DistributedDataParallel with a loader and default settings", is_parallel=True),
    "ddp-best": Contender("ddp:ddp_best", "DistributedDataParallel with its best settings", is_parallel=True),
    "ddp-compiled": Contender("ddp:ddp_compiled", "the same through torch.compile", is_parallel=True),
    "fabric": Contender("fabric:fabric", "Lightning Fabric, best settings", ("lightning_fabric", "lightning"), True),
    "accelerate": Contender("accelerate:accelerate", "Accelerate, best settings", ("accelerate",), True),
}
EXCHANGE = Contender("exchanges:Exchanges", "the exchanges and all_reduce, in the same processes", is_parallel=True)


def usual_contenders(num_devices: int, is_on_gpu: bool) -> list[str]:
    """Those that are measured where none are named."""
    left_out = {"ddp-compiled"}
    if num_devices == 1:
        left_out.add(ONE_DEVICE)
    if not is_on_gpu:
        left_out.add(ONE_SHARD)
    return [name for name in CONTENDERS if name not in left_out]
