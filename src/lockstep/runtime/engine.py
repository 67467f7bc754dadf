"""What an engine offers to a step, and what it asks of a replica.

Lists have one entry for each rank that this process owns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from lockstep.backends import Backend, Ready, Tensor
from lockstep.core.device import Device
from lockstep.core.layout import Array
from lockstep.partition.balance import Balance
from lockstep.core.tracing import Trace


@dataclass(frozen=True)
class Batch:
    """The samples of one update, and how a rank gets some of them."""

    num_samples: int
    fetch: Callable[[int, int, int], tuple[Any, Any]]  # (rank, start, stop) -> X, y on the rank's device
    refill: Callable[[], None] | None = None  # makes a `fetch` that was recorded find the samples of this batch
    gather: Callable[[], None] | None = None  # in a recording: all samples at once, for `fetch` to cut from


class Shard(NamedTuple):
    """A shard's number in its batch, and its samples on the rank's device."""

    number: int
    num_samples: int
    X: Any
    y: Any
    ready: Ready | None = None  # may be told that the gradient is complete from some place on, before all of it is


class Leaf(NamedTuple):
    """What a shard leaves behind."""

    gradient: Tensor  # of the summed loss, one flat vector
    loss: Tensor  # summed over the shard's samples
    row: Any = None  # what the shard made of the model's buffers, where it has some: tensors by name
    used: frozenset[int] = frozenset()  # numbers of the parameters that got a gradient, where the model can tell


# All shards' tensors in shard order, from those of a rank's own shards; every rank that has shards must come.
Meet = Callable[[str, list[Tensor]], list[Tensor]]


class Replica(Protocol):
    """One rank's copy of what is trained. Only that rank's thread calls it."""

    @property
    def size(self) -> int:
        """Numbers of its gradient, which is one flat vector."""
        ...

    def leaves(self, step: int, shards: Iterator[Shard], meet: Meet) -> Iterator[Leaf]:
        """The leaves of the rank's own shards, in their order. `step` counts from 1."""
        ...

    def update(self, step: int, total: Tensor, batch: "Gathered") -> None:
        """Applies the sum of all shards' gradients."""
        ...

    def repeats_update(self, step: int) -> bool:
        """Whether an update that is recorded now can be replayed in all later steps."""
        ...

    def rehearse_update(self, step: int, total: Tensor, batch: "Gathered") -> None:
        """Computes what an update would, and changes nothing."""
        ...

    def measure(self, X: Any, y: Any) -> dict[str, float]:
        """Metrics of a few samples, each summed over them."""
        ...

    def arrays(self) -> dict[str, Array]:
        """Parameters and buffers by name, in model order."""
        ...

    def fingerprints(self) -> list[str]:
        """A short hash of each of these arrays: equal for equal bits, and as good as never otherwise."""
        ...

    def recordable(self) -> str:
        """Why its shards cannot be recorded and replayed; nothing if they can."""
        ...

    def record(self, step: int) -> None:
        """A step is about to be recorded: its shards are computed beside each other, more than once."""
        ...

    def replay(self, step: int) -> None:
        """A recording of its shards is about to be replayed for this step."""
        ...

    def forget(self) -> None:
        """There is no recording after all, and nothing was computed."""
        ...

    def generators(self) -> list[Any]:
        """The framework's sources of random numbers that its shards draw from in a recording."""
        ...

    def memory(self) -> Any:
        """What it needs beside these to go on in a new replica, as plain values and arrays: the optimizer's state."""
        ...


@dataclass(frozen=True)
class Gradients:
    """What forward and backward leave on the local ranks."""

    ranges: tuple[range, ...]  # the shards of every rank, not only of the local ones
    totals: Callable[[], list[Tensor]]  # waits until the exchange that has begun is over; a total for each local rank
    losses: list[list[Any]]  # one for each shard, summed over its samples: numbers, or tensors in a recording
    rows: list[list[Any]]  # one for each shard of a model that has buffers
    used: list[list[int]]  # numbers of the parameters that got a gradient
    seconds: list[float]  # that each rank took


class Exchanged(NamedTuple):
    """What every rank knows of all shards after the exchange. From here on, a step needs nobody else."""

    totals: list[Tensor]  # the sum of all shards' gradients, for each local rank
    losses: list[Any]  # of all shards, in shard order: numbers, or tensors in a recording
    rows: list[Any]
    used: frozenset[int]


class Gathered(NamedTuple):
    """What a rank knows about the whole batch when it updates."""

    shard_sizes: list[int]
    rows: list[Any]  # of all shards, in shard order, on the rank's device
    used: frozenset[int]  # numbers of the parameters that got a gradient in any shard

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return sum(self.shard_sizes)


class Engine(Protocol):
    """Runs the ranks. A context manager: leaving it ends every thread and process it started."""

    backend: Backend
    devices: list[Device]  # of all ranks
    num_ranks: int
    local_ranks: range
    balance: Balance  # which shards a rank gets
    traces: list[Trace]  # of the local ranks, while a run is traced
    is_recording: bool  # now: what is asked for is asked for once, and done again and again

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def each(self, phase: str, work: Callable[..., Any], *lists: Sequence[Any]) -> list[Any]:
        """`work(rank, device, ...)` for each local rank, all at the same time, with its entries of `lists`."""
        ...

    def enter(self, phase: str) -> None:
        """Says what this process does between the phases of a step, for those who wait for it."""
        ...

    def replicate(self, make: Callable[[Device], Any]) -> list[Any]:
        """`make(device)` for each local rank: its replica."""
        ...

    def place(self, array: Array) -> list[Tensor]:
        """Data to read from, for each local rank; ranks on the same device share it."""
        ...

    def forward_backward(
        self, replicas: Sequence[Replica], step: int, batch: Batch, shards: list[range]
    ) -> Gradients: ...
    def exchange(self, gradients: Gradients) -> Exchanged:
        """The sum of all shards' gradients, and what else all ranks have to know."""
        ...

    def update(self, replicas: Sequence[Replica], step: int, exchanged: Exchanged, shards: list[range]) -> None:
        """Every replica applies its total. Nobody waits for anybody here: a step is done, or has not happened."""
        ...

    def gather(self, values: list[Any]) -> list[Any]:
        """The plain values (numbers, lists of numbers) of all ranks, from those of the local ones."""
        ...

    def share(self, source: int, make: Callable[[], bytes]) -> bytes:
        """On every rank the bytes that `make()` gives on rank `source`."""
        ...

    def close(self) -> None: ...
