"""What transfers between processes queue up in: Gloo, or one of NCCL's communicators.

NCCL makes a communicator when a group of transfers is first started on it, and waits until all of its ranks have done
so. A rank that never sends anything there would keep the others waiting: each has the ranks that use it, and no others.
Two neighbours in a pipeline have theirs, and so have the ranks that hold the same part of the model. And as nobody may
wait when a step sends something, all communicators of a schedule are connected before, on all ranks in one order.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lockstep.core.device import Device
from lockstep.runtime.authenticated_store import without_marks
from lockstep.runtime.store import LOOPBACK, Store, interface_of, prefix_store
from lockstep.schedules.instructions import ACTIVATION_GRADIENTS, ACTIVATIONS, Communicate, Schedule, communicator_of

SHARED_GPU = "LOCKSTEP_NCCL_SHARED_GPU"  # set to 1 in tests: NCCL between ranks on one GPU, which it refuses otherwise


class Communicator(NamedTuple):
    """Where transfers wait for those before them, and for no others."""

    name: str
    ranks: tuple[int, ...] = ()  # that share it; none: Gloo, which has all

    def number_of(self, rank: int) -> int:
        """The number of a rank among those of the communicator."""
        return self.ranks.index(rank) if self.ranks else rank


GLOO = Communicator("gloo")  # it tells messages apart by their tags


def connect_gloo(store: Store, rank: int, size: int, address: str, seconds: float) -> Any:
    """Connections to all ranks."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupGloo(prefix_store(GLOO.name, store), rank, size, options)


def uses_nccl(devices: Sequence[Device], address: str) -> bool:
    """Whether tensors go over NCCL; it refuses two ranks on one GPU, whose tensors go through the CPU's memory."""
    is_allowed = are_apart(devices, address) or os.environ.get(SHARED_GPU) == "1"
    return devices[0].kind == "cuda" and is_allowed


def are_apart(devices: Sequence[Device], address: str) -> bool:
    """Whether every rank has a GPU of its own; devices of several machines have the same names."""
    return len(set(devices)) == len(devices) or address != LOOPBACK


def prepare_nccl(devices: Sequence[Device], address: str) -> None:
    """Settings of NCCL's that it reads from the environment."""
    if name := interface_of(address):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    if not are_apart(devices, address):  # it believes that ranks on one GPU are on different machines
        os.environ |= {"NCCL_HOSTID": f"process-{os.getpid()}", "NCCL_IB_DISABLE": "1"}


def connect_nccl(store: Store, rank: int, communicator: Communicator, seconds: float) -> Any:
    """NCCL between the ranks of a communicator; they find each other when they first use it."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    options.global_ranks_in_group, options.group_name = list(communicator.ranks), name_of(communicator)
    own = prefix_store(f"nccl {name_of(communicator)}", without_marks(store))
    return dist.ProcessGroupNCCL(own, communicator.number_of(rank), len(communicator.ranks), options)


def communicators_of(schedule: Schedule) -> list[Communicator]:
    """All communicators that the transfers of a schedule need, in the one order in which they are connected."""
    found = set[Communicator]()
    for rank, program in enumerate(schedule.programs):
        for one in (*program.compute, *program.exchange, *program.update):
            if isinstance(one, Communicate):
                name = communicator_of(one.channel, one.round)
                others = [*(send.to for send in one.sends), *(receive.source for receive in one.receives)]
                if one.channel in (ACTIVATIONS, ACTIVATION_GRADIENTS):
                    found.update(Communicator(name, (min(rank, other), max(rank, other))) for other in others)
                else:
                    found.add(Communicator(name, tuple(schedule.replicas_of(rank))))
    return sorted(found)


def name_of(communicator: Communicator) -> str:
    """A name that no other communicator has.

    >>> name_of(Communicator("activations 0", (0, 1)))
    'activations 0 of 0,1'
    """
    return f"{communicator.name} of {','.join(map(str, communicator.ranks))}"
