"""What an engine offers to a step. Lists have one entry for each rank that this process owns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from lockstep.backends import Backend, LossSum, Tensor
from lockstep.device import Device
from lockstep.exchange.nodes import Node
from lockstep.layout import Array, Layout


@dataclass(frozen=True)
class Batch:
    """The samples of one update, and how a rank gets some of them."""

    num_samples: int
    fetch: Callable[[int, int, int], tuple[Tensor, Tensor]]  # (rank, start, stop) -> X, y on the rank's device


@dataclass(frozen=True)
class Gradients:
    """What forward and backward leave on the local ranks: the nodes of the tree that a rank can add up alone."""

    ranges: tuple[range, ...]  # the shards of every rank, not only of the local ones
    nodes: list[dict[Node, Tensor]]
    losses: list[list[float]]  # one for each shard, summed over its samples


class Engine(Protocol):
    """Runs the ranks. A context manager: leaving it ends every thread and process it started."""

    backend: Backend
    num_ranks: int
    local_ranks: range

    def __init__(self, backend: Backend, devices: list[Device], exchange: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def each(self, phase: str, work: Callable[..., Any], *lists: list[Any]) -> list[Any]:
        """`work(rank, device, ...)` for each local rank, all at the same time, with its entries of `lists`."""
        ...

    def replicate(self, flat: Array) -> list[Tensor]:
        """A copy of the parameters for each local rank."""
        ...

    def place(self, array: Array) -> list[Tensor]:
        """Data to read from, for each local rank; ranks on the same device share it."""
        ...

    def forward_backward(
        self, loss_sum: LossSum, layout: Layout, replicas: list[Tensor], batch: Batch, shards: list[range]
    ) -> Gradients: ...
    def exchange(self, gradients: Gradients) -> list[Tensor]:
        """The sum of all shards' gradients, for each local rank."""
        ...

    def update(
        self,
        rule: Callable[[Tensor, Tensor], Tensor],
        replicas: list[Tensor],
        totals: list[Tensor],
        num_samples: int,
    ) -> list[Tensor]:
        """New replicas: `rule(parameters, mean gradient)`. The total is divided here, once."""
        ...

    def gather(self, values: list[Any]) -> list[Any]:
        """The plain values (numbers, lists of numbers) of all ranks, from those of the local ones."""
        ...

    def close(self) -> None: ...
