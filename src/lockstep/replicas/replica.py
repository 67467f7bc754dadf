"""What a rank holds, as the runtime sees it: a full copy of what is trained, or the part that its rank owns."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from lockstep.backends import OnReady, Pieces, Tensor
from lockstep.core.layout import Array


class Shard(NamedTuple):
    """One shard of a batch: its number, and its samples on the rank's device."""

    number: int
    num_samples: int
    X: Any
    y: Any
    on_ready: OnReady | None = None  # called during the backward pass, with the gradient entries that are complete


class Leaf(NamedTuple):
    """The result of a shard's forward and backward pass."""

    gradient: Tensor | Pieces  # of the summed loss, one flat vector
    loss: Tensor  # summed over the shard's samples
    buffers: Any = None  # updates of the model's buffers: tensors by name
    used: frozenset[int] = frozenset()  # numbers of the parameters that got a gradient, where the model can tell
    weight: Any = None  # what the loss of the batch is divided by, this shard's part; None: its number of samples


class BatchSummary(NamedTuple):
    """What an update has to know about the whole batch."""

    shard_sizes: list[int]
    buffers: list[Any]  # buffer updates of all shards, in shard order, on the rank's device
    used: frozenset[int]  # numbers of the parameters that got a gradient in any shard
    weights: list[float] | None = None  # of all shards, where the loss has weights of its own

    @property
    def divisor(self) -> float:
        """What the summed gradient is divided by: the samples of the batch, or their weights."""
        return sum(self.shard_sizes) if self.weights is None else math.fsum(self.weights)


class Measured(NamedTuple):
    """What the evaluation of a few samples leaves."""

    sums: dict[str, list[float]]  # of each metric the sum over them, and what the sum of all samples is divided by
    outputs: tuple[Array, Array] | None = None  # and targets, where a metric is one of all samples together


# (name of the layer, tensors of a rank's own shards) -> the tensors of all shards, in shard order. A collective of all
# ranks that have shards; the name must be the same for all.
AllGatherTensors = Callable[[str, list[Tensor]], list[Tensor]]


class Replica(Protocol):
    """One rank's copy of what is trained. Only that rank's thread calls it."""

    @property
    def entries(self) -> range:
        """The part of the model's flat parameter vector that it holds; its gradient has as many entries."""

    def begin_step(self, step: int) -> None:
        """Called before the shards of a step; steps count from 1."""

    def forward_backward(self, shards: list[Shard], all_gather: AllGatherTensors) -> list[Leaf]:
        """The leaves of these shards: one shard a call, or all of a rank's where they are computed layer by layer."""

    def update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        """Applies the sum of all shards' gradients."""

    def measure(self, X: Any, y: Any) -> Measured:
        """Metrics of a few samples."""

    def arrays(self) -> dict[str, Array]:
        """Parameters and buffers by name, in model order."""

    def snapshot(self) -> Callable[[], dict[str, Array]]:
        """The arrays as they are now, for whoever asks for them later; only the last snapshot is kept."""

    def is_finite(self) -> bool:
        """Whether all its parameters are finite numbers."""

    def fingerprints(self) -> dict[str, str]:
        """A hash of each of these arrays, to compare replicas by."""

    def averaged(self) -> dict[str, Array]:
        """The moving average of parameters and buffers, where there is one."""

    def undo_step(self) -> None:
        """The step that has begun will not be updated: buffers are as they were before."""

    def digest(self, leaf: Leaf) -> dict[str, Any]:
        """A checksum of the leaf's gradient for each parameter, of its loss, and of each buffer that it changed."""

    def kept_state(self, only_counters: bool = False) -> dict[str, str]:
        """What the model and the loss keep besides parameters and buffers; or `only_counters`, integers among it."""

    def changed_state(self, before: dict[str, str], only_counters: bool = False) -> list[str]:
        """The names of what has changed of that since; or `only_counters`, of those."""

    def state_dict(self) -> Any:
        """What else a new replica needs to continue, as plain values and arrays: the optimizer's state."""


class Capturable(Protocol):
    """What CUDA graph capture needs of a replica. The defaults are for one whose shards change no state."""

    def why_not_capturable(self) -> str:
        """Why its shards cannot be captured; empty if they can."""
        return ""

    def begin_capture(self, step: int) -> None:
        """Called before a step is computed for capture, shards side by side: once to warm up, once captured."""
        return

    def begin_replay(self, step: int) -> None:
        """Called before the captured step is replayed as step number `step`."""
        return

    def discard_capture(self) -> None:
        """Called when a capture is given up; nothing was computed."""
        return

    def capture_generators(self) -> list[Any]:
        """The framework's random number generators that its shards draw from in a replay."""
        return []

    def update_is_static(self, step: int) -> bool:
        """Whether an update that is captured now can be replayed in all later steps."""
        return False

    def warm_up_update(self, step: int, total: Tensor, batch: BatchSummary) -> None:
        """Computes what an update would, and changes nothing; only called where the update is static."""
        return

    def update_settings(self) -> Any:
        """Settings that a captured `apply_update` has built in; None if it cannot be captured."""
        return None

    def begin_update(self, step: int) -> None:
        """What the host does before an update, also before a replayed one."""
        return

    def apply_update(self, total: Tensor, batch: BatchSummary) -> None:
        """What the device does: `update` is this, between the two others."""
        return

    def end_update(self) -> None:
        """What the host does after it."""
        return


class CapturableReplica(Replica, Capturable, Protocol):
    """A replica whose steps can be captured."""
