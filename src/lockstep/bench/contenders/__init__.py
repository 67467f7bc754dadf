"""The contenders: each runs in processes of its own (`python -m lockstep.bench.contenders`).

A process reads commands from standard input and answers each with a line of JSON on standard output. While others are
measured, it waits for the next command and computes nothing.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
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

    def prepare(self) -> dict[str, Any]:
        """Gets ready while the others do so too, where that takes long."""
        ...

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
    settings: Mapping[str, Any] = MappingProxyType({})  # of our own step, where it is measured in several ways
    optimizers: tuple[str, ...] = ("sgd", "adamw")

    def make(self, workload: Workload, rank: ContenderRank) -> Runner:
        """The contender, set up in this process."""
        module, _, function = self.factory.partition(":")
        workload = replace(workload, settings={**workload.settings, **self.settings})
        runner: Runner = getattr(import_module(f"{__name__}.{module}"), function)(workload, rank)
        return runner

    def problem(self, workload: Workload) -> str:
        """Why it cannot be measured; empty if it can."""
        if workload.optimizer not in self.optimizers:
            return f"it has no {workload.optimizer}"
        is_installed = not self.packages or any(map(importlib.util.find_spec, self.packages))
        return "" if is_installed else f"not installed: {INSTALL}"


OURS, ONE_DEVICE, ONE_SHARD, COMPILED = "lockstep", "lockstep-1-device", "lockstep-1-shard", "lockstep-compiled"
SHARD_COUNTS = {
    f"lockstep-{number}-shard{'s' * (number > 1)}": Contender(
        "lockstep:LockstepRun",
        f"the same with {number} shard{'s' * (number > 1)} a batch: what they cost",
        is_own=True,
        settings={"num_shards": number},
    )
    for number in (1, 2, 4, 16)
}
CONTENDERS = {
    OURS: Contender("lockstep:LockstepRun", "the step of `lockstep train`", is_own=True),
    ONE_DEVICE: Contender("lockstep:one_device", "the same on the first device alone", is_own=True),
    COMPILED: Contender("lockstep:LockstepRun", "the same with --compile", is_own=True, settings={"compile": True}),
    **SHARD_COUNTS,
    "text": Contender(
        "text:text", "the text's program: replicas in one process, loader with 4 processes", optimizers=("sgd",)
    ),
    "text-in-memory": Contender("text:text_in_memory", "the same with its data in memory", optimizers=("sgd",)),
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
    left_out = {"ddp-compiled", COMPILED, *SHARD_COUNTS, ONE_DEVICE if num_devices == 1 else ""}
    left_out -= {ONE_SHARD} if is_on_gpu else set()
    return [name for name in CONTENDERS if name not in left_out]
