"""What a rank holds, as the runtime sees it: a full copy of what is trained, or the part that its rank owns."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from lockstep.backends import OnReady, Tensor
from lockstep.core.layout import Array


class Shard(NamedTuple):
    """A shard's number in its batch, and its samples on the rank's device."""

    number: int
    num_samples: int
    X: Any
    y: Any
    on_ready: OnReady | None = None  # to be told which entries of the gradient are complete, while backward goes on


class Leaf(NamedTuple):
    """What a shard leaves behind."""

    gradient: Tensor  # of the summed loss, one flat vector
    loss: Tensor  # summed over the shard's samples
    buffers: Any = None  # what the shard made of the model's buffers, where it has some: tensors by name
    used: frozenset[int] = frozenset()  # numbers of the parameters that got a gradient, where the model can tell


class BatchSummary(NamedTuple):
    """What a rank knows about the whole batch when it updates."""

    shard_sizes: list[int]
    buffers: list[Any]  # what the shards left, in shard order, on the rank's device
    used: frozenset[int]  # numbers of the parameters that got a gradient in any shard

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return sum(self.shard_sizes)


# All shards' tensors in shard order, from those of a rank's own shards; a collective of all ranks that have shards.
# The string says at which layer: it must be the same for all.
AllGatherTensors = Callable[[str, list[Tensor]], list[Tensor]]


class Replica(Protocol):
    """One rank's copy of what is trained. Only that rank's thread calls it."""

    @property
    def entries(self) -> range:
        """The part of the model's flat parameter vector that it holds; its gradient is a vector of as many entries."""
        ...

    def begin_step(self, step: int) -> None:
        """Called before the shards of a step, which counts from 1."""
        ...

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        """The leaves of these shards. Several are given only where they go through the model together."""
        ...

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        """Applies the sum of all shards' gradients."""
        ...

    def measure(self, X: Any, y: Any) -> dict[str, float]:
        """Metrics of a few samples, each summed over them."""
        ...

    def arrays(self) -> dict[str, Array]:
        """Parameters and buffers by name, in model order."""
        ...

    def fingerprints(self) -> dict[str, str]:
        """A short hash of each of these arrays: equal for equal bits, and as good as never otherwise."""
        ...

    def state_dict(self) -> Any:
        """What a new replica needs besides these to continue, as plain values and arrays: the optimizer's state."""
        ...


class Capturable(Protocol):
    """What CUDA graph capture needs of a replica. The defaults are for one in which a shard leaves nothing behind."""

    def why_not_capturable(self) -> str:
        """Why its shards cannot be captured; empty if they can."""
        return ""

    def begin_capture(self, step: int) -> None:
        """A step is about to be computed for capture, shards side by side: once to warm up, and once captured."""
        return

    def begin_replay(self, step: int) -> None:
        """The captured step is about to be replayed as step number `step`."""
        return

    def discard_capture(self) -> None:
        """There is no captured step after all, and nothing was computed."""
        return

    def capture_generators(self) -> list[Any]:
        """The framework's random number generators that its shards draw from when they are replayed."""
        return []

    def update_is_static(self, step: int) -> bool:
        """Whether an update that is captured now can be replayed in all later steps."""
        return False

    def warm_up_update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        """Computes what an update would, and changes nothing; only called where the update is static."""
        return


class CapturableReplica(Replica, Capturable, Protocol):
    """A replica whose steps can be captured."""
