"""The contenders: each runs in processes of its own (`python -m lockstep.bench.contenders`).

A process reads commands from standard input and answers each with a line of JSON on standard output. While others are
measured, it waits for the next command and computes nothing.
"""

import importlib.util
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from lockstep.bench.workload import Workload

INSTALL = "pip install 'lockstep[bench]'"


class ContenderRank(NamedTuple):
    """Which of a contender's processes this is, and where its ranks rendezvous."""

    rank: int
    num_ranks: int
    device: str  # as this process sees it
    store_port: int  # of a TCPStore on this machine
    store_prefix: str


class Runner(Protocol):
    """A contender, in one of its processes. Its methods are the commands that it is sent."""

    def warm_up(self, **arguments: Any) -> dict[str, Any]:
        """Runs some steps and finds the fastest settings: `chosen` describes them."""
        ...

    def run(self, **arguments: Any) -> dict[str, Any]:
        """One trial: the `seconds` it took, and the `loss` of its last step."""
        ...

    def close(self) -> None: ...  # standard input has ended


class Contender(NamedTuple):
    """One that can be measured."""

    factory: str  # module:function in this package; (Workload, ContenderRank) -> Runner
    about: str
    packages: tuple[str, ...] = ()  # one of them must be installed
    is_parallel: bool = False  # it has a process for each device
    is_own: bool = False  # it has `finish`, which gives the weights: the same for every number of devices

    def make(self, workload: Workload, rank: ContenderRank) -> Runner:
        """The contender, set up in this process."""
        module, _, function = self.factory.partition(":")
        runner: Runner = getattr(import_module(f"{__name__}.{module}"), function)(workload, rank)
        return runner

    def problem(self) -> str:
        """Why it cannot be measured; empty if it can."""
        is_installed = not self.packages or any(map(importlib.util.find_spec, self.packages))
        return "" if is_installed else f"not installed: {INSTALL}"


OURS, ONE_DEVICE, ONE_SHARD = "lockstep", "lockstep-1-device", "lockstep-1-shard"
CONTENDERS = {
    OURS: Contender("lockstep:LockstepRun", "the step of `lockstep train`", is_own=True),
    ONE_DEVICE: Contender("lockstep:one_device", "the same on the first device alone", is_own=True),
    ONE_SHARD: Contender("lockstep:one_shard", "the same without shards: what they cost", is_own=True),
    "text": Contender("text:text", "the text's program: replicas in one process, loader with 4 processes"),
    "text-in-memory": Contender("text:text_in_memory", "the same with its data in memory"),
    "ddp": Contender("distributed:ddp", "DistributedDataParallel with a loader and default settings", is_parallel=True),
    "ddp-best": Contender("distributed:ddp_best", "DistributedDataParallel with its best settings", is_parallel=True),
    "ddp-compiled": Contender("distributed:ddp_compiled", "the same through torch.compile", is_parallel=True),
    "fabric": Contender(
        "distributed:fabric", "Lightning Fabric, best settings", ("lightning_fabric", "lightning"), True
    ),
    "accelerate": Contender("distributed:accelerate", "Accelerate, best settings", ("accelerate",), True),
}
EXCHANGES = Contender("exchanges:Exchanges", "the exchanges and all_reduce, in the same processes", is_parallel=True)


def default_contenders(num_devices: int, is_on_gpu: bool) -> list[str]:
    """Those that are measured if the user names none."""
    left_out = {"ddp-compiled", ONE_DEVICE if num_devices == 1 else "", "" if is_on_gpu else ONE_SHARD}
    return [name for name in CONTENDERS if name not in left_out]
