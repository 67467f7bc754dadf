"""What a rank holds, as the runtime sees it: a full copy of what is trained, or the part that its rank owns."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from lockstep.backends import OnReady, Pieces, Tensor
from lockstep.core.errors import RunError
from lockstep.core.layout import Array


class Shard(NamedTuple):
    """One shard of a batch: its number, and its samples on the rank's device."""

    number: int
    num_samples: int
    X: Any
    y: Any
    on_ready: OnReady | None = None  # called during the backward pass, with the gradient entries that are complete
    random: Any = None  # how far its random numbers have got in earlier stages
    is_cut: bool = False  # X is what an earlier stage has handed over


class Leaf(NamedTuple):
    """The result of a shard's forward and backward pass."""

    gradient: Tensor | Pieces  # of the summed loss, one flat vector
    loss: Tensor  # summed over the shard's samples
    buffers: Any = None  # updates of the model's buffers: tensors by name
    used: frozenset[int] = frozenset()  # numbers of the parameters that got a gradient, where the model can tell
    weight: Any = None  # what the loss of the batch is divided by, this shard's part; None: its number of samples

    def joined(self, earlier: "Leaf") -> "Leaf":
        """With that of an earlier stage of the same shard."""
        buffers = self.buffers if earlier.buffers is None else {**(self.buffers or {}), **earlier.buffers}
        return self._replace(buffers=buffers, used=self.used | earlier.used)


class StageTensors(NamedTuple):
    """What goes from one stage of a network to the next for a shard, or comes back."""

    values: list[Any]  # tensors, or None for a gradient that there is none of
    random: Any = None  # how far the shard's random numbers have got, where any were drawn
    form: Any = None  # the tuples and dicts that the tensors are in, where the framework has such (`crossing.py`)
    sharing: tuple[int, ...] = ()  # numbers of tensors that share memory with another one


class BatchSummary(NamedTuple):
    """What an update has to know about the whole batch."""

    shard_sizes: list[int]
    buffers: list[Any]  # buffer updates of all shards, in shard order, on the rank's device
    used: frozenset[int]  # numbers of the parameters that got a gradient in any shard
    weights: list[float] | None = None  # of all shards, where the loss has weights of its own
    norms: dict[str, float] | None = None  # of the gradients of all parameters, where no rank has them all

    @property
    def divisor(self) -> float:
        """What the summed gradient is divided by: the samples of the batch, or their weights."""
        divisor = sum(self.shard_sizes) if self.weights is None else math.fsum(self.weights)
        if not divisor:
            raise RunError(
                "The weights of the loss add up to 0 in this batch: nothing in it counts. Leave such batches out."
            )
        return divisor


class Evaluated(NamedTuple):
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
        """Applies the sum of all shards' gradients, or of those entries that it owns; None where it owns none."""

    def gradient_norms(self, total: Tensor, batch: BatchSummary) -> dict[str, float]:
        """The norm of each gradient that it would update by."""

    def parameters(self, entries: range) -> Tensor:
        """The values of these entries of its flat vector."""

    def set_parameters(self, entries: range, values: Tensor) -> None:
        """Replaces them."""

    def finish_update(self) -> None:
        """Called when all its parameters have their new values."""

    def num_bytes(self) -> dict[str, int]:
        """The memory of its parameters, of a gradient, and of the optimizer's state."""

    def evaluate(self, X: Any, y: Any) -> Evaluated:
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

    def state_dict(self) -> "ReplicaState":
        """What else a new replica needs to continue: the optimizer's state of the parameters that it owns."""


OF_PARAMETER = "optimizer/"  # how the names of units begin that are the optimizer's state of a parameter


class ReplicaState(NamedTuple):
    """A replica's state besides parameters and buffers, as plain values and arrays. Those of all ranks are merged."""

    units: dict[str, Any]  # by name: the optimizer's state of a parameter, an average of it, a buffer that is not saved
    common: dict[str, Any]  # what is the same on all ranks: settings of the optimizer, the scheduler's state


class PartReplica(Replica, Protocol):
    """A replica of a part of the model: a stage of the network, or a share of its layers."""

    @property
    def num_parameters(self) -> int:
        """How many parameters are trained."""

    @property
    def owned(self) -> list[range]:
        """The entries that each of the ranks updates that share the update of this part."""

    @property
    def updated(self) -> range:
        """Those that this one does."""

    def learning_rate(self, step: int) -> float | None:
        """That of one of the last steps, where it has one."""

    def forward(
        self, shard: Shard, stage: int, cut: StageTensors | None, all_gather: AllGatherTensors
    ) -> StageTensors | None:
        """Takes a shard through a stage; what the next one gets, or None after the last."""

    def backward(self, number: int, stage: int, gradients: list[Any] | None) -> tuple[Leaf, list[Any]]:
        """Takes a shard back: its leaf, and the gradients of what came with its cut."""

    def evaluate_stage(
        self, shard: Shard, stage: int, cut: StageTensors | None, all_gather: AllGatherTensors
    ) -> StageTensors | Evaluated:
        """Takes samples through a stage to evaluate them; after the last, their metrics."""


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

    def go_together(self, shards: list[Shard]) -> bool:
        """Whether shards of this size can be given to `forward_backward` at once, with the bits that each has alone."""
        return False

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
