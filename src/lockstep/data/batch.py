"""A batch, and where batches come from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lockstep.backends import Backend, Tensor
from lockstep.core.device import Device
from lockstep.core.errors import RunError
from lockstep.core.layout import Array

Fetch = Callable[[int, int, int], tuple[Any, Any]]  # (rank, start, stop) -> X, y on the rank's device
Split = Callable[[int], list[range]]  # samples of a batch -> its shards


class StaticBatch(NamedTuple):
    """The same batch in memory of one rank's device that stays in place, as a captured CUDA graph needs it."""

    fill: Callable[[], None]  # writes the batch, or its sample numbers, to where a captured `gather` reads them
    gather: Callable[[], None]  # all samples at once, for `fetch` to slice
    fetch: Fetch


@dataclass(frozen=True)
class Batch:
    """The samples of one update, and how a rank gets some of them."""

    num_samples: int
    fetch: Fetch
    static: Callable[[int], StaticBatch] | None = None  # for a rank
    check: Callable[[int, int], None] | None = None  # loads samples (start, stop) again, and refuses others


class BatchSource(Protocol):
    """Where batches come from."""

    num_samples: int
    in_memory: bool  # a batch may be as large as all samples: nothing is loaded before it is fetched

    def batches(self, order: Array, batch_size: int, split: Split, epoch: int) -> Iterator[Batch]:
        """The samples in `order`, in batches; a rank will fetch the shards that `split` makes of each."""

    def close(self) -> None:
        """Ends the processes that load samples."""


class LoadingSource(BatchSource, Protocol):
    """A source that loads samples one by one."""

    num_workers: int  # processes that load shards; none: whoever asks for a batch does
    num_ahead: int  # shards that each of them loads before somebody asks


class DeviceMemory(Protocol):
    """The devices of this process's ranks, as a batch source sees them: an engine is one."""

    backend: Backend
    devices: list[Device]  # of all ranks
    num_ranks: int
    local_ranks: range  # those of this process

    def copy_to_devices(self, array: Array) -> list[Tensor]:
        """The array on the device of each local rank, to read from; ranks on the same device share it."""


@contextmanager
def loader_errors() -> Iterator[None]:
    """Turns the error about a dead DataLoader worker, which may come at any line, into a sentence."""
    try:
        yield
    except RuntimeError as problem:
        if "DataLoader worker" not in str(problem):
            raise
        reason = str(problem).partition(". ")[0]
        raise RunError(
            f"The data cannot be loaded: {reason}. It was killed, exited, or ran out of memory: use fewer workers "
            f"(--workers), or none to see more (--workers 0)."
        ) from problem
