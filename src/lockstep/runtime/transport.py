"""How values get from rank to rank: what the interpreter asks of threads (copies) and of processes (Gloo, NCCL)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from lockstep.backends import Tensor
from lockstep.core.errors import RunError
from lockstep.replicas.replica import StageTensors
from lockstep.runtime.engine import RankResult
from lockstep.schedules.instructions import ACTIVATION_GRADIENTS, ACTIVATIONS, CHANNELS


class Cancelled(Exception):
    """Another rank failed, or did not arrive in time: this one only waited for it."""


class GroupKey(NamedTuple):
    """The name of a group of transfers."""

    channel: str
    number: int
    round: int

    @property
    def tag(self) -> int:
        """What tells messages between two ranks apart: those of different channels, buckets and shards."""
        return CHANNELS.index(self.channel) << 20 | self.number


class TransferGroup(NamedTuple):
    """Sends and receives that are started together and complete together."""

    key: GroupKey
    sends: list[tuple[int, Tensor | StageTensors]]  # rank, what is sent to it
    receives: list[tuple[int, Tensor | None]]  # rank, memory for what it sends; None: no particular memory

    @property
    def has_stage_tensors(self) -> bool:
        """Whether these are activations, or their gradients, whose shapes only the sender knows."""
        return self.key.channel in (ACTIVATIONS, ACTIVATION_GRADIENTS)


class Transport(Protocol):
    """One rank's connections to the others."""

    def shares_memory_with(self, rank: int) -> bool:
        """Whether what that rank sends can be read where it is, without a copy."""
        ...

    def start(self, group: TransferGroup) -> None:
        """Starts to send and receive. Until it is finished, none of these tensors may be written to."""
        ...

    def finish(self, key: GroupKey) -> list[Tensor | StageTensors]:
        """Waits for a group, with a deadline; what was received, in the order of its receives."""
        ...

    def all_reduce(self, own: Tensor) -> Tensor:
        """The sum over all ranks, by the framework's own all-reduce."""
        ...

    def all_gather(self, own: RankResult) -> Callable[[], list[RankResult]]:
        """Starts to tell all ranks; the function waits for all of theirs, with tensors on this rank's device."""
        ...

    def all_gather_tensors(self, ranks: Sequence[int], layer: str, own: list[Tensor]) -> list[Tensor]:
        """The tensors of these ranks, in their order, and so in that of shards or slices; all must be at this layer."""
        ...

    def cancel(self) -> None:
        """This rank has failed: whoever waits for it in this process is woken."""
        ...


def check_same_layer(own: str, others: Sequence[str]) -> None:
    """Refuses shards that are not at the same layer when they exchange statistics."""
    for other in others:
        if other != own:
            raise RunError(
                f"Shards of one batch take different paths through the model: one is at {own}, another at {other}. "
                f"Statistics of the whole batch need all of them at the same layer: use --batch-norm shard."
            )
