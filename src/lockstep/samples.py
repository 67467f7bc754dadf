"""Samples within reach of every rank, and batches of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from lockstep.backends import Tensor
from lockstep.data.dataset import leaves_of, map_leaves
from lockstep.engines import Batch, Engine
from lockstep.errors import RunError
from lockstep.layout import Array

Split = Callable[[int], list[range]]  # samples of a batch -> its shards


class Feed(Protocol):
    """Where batches come from."""

    num_samples: int
    in_memory: bool  # a batch may be as large as all samples: nothing is loaded before it is fetched

    def batches(self, order: Array, batch_size: int, split: Split, epoch: int) -> Iterator[Batch]:
        """The samples in `order`, in batches; a rank will fetch the shards that `split` makes of each."""
        ...

    def close(self) -> None:
        """Ends what was started to load samples."""
        ...


@contextmanager
def lost_loaders() -> Iterator[None]:
    """Says in a sentence that a process which loads samples has died: the news may come at any line of this thread."""
    try:
        yield
    except RuntimeError as problem:
        if "DataLoader worker" not in str(problem):
            raise
        said = str(problem).partition(". ")[0]
        raise RunError(
            f"The data cannot be loaded: {said}. It was killed, ended itself, or ran out of memory: use fewer "
            f"processes (--workers), or none to see more (--workers 0)."
        ) from problem


class Samples:
    """Placed once on each device; a batch is then a list of sample numbers, and a shard is gathered where needed."""

    in_memory = True

    def __init__(self, engine: Engine, X: Any, y: Any) -> None:
        self._engine, self.num_samples = engine, len(leaves_of(X)[0])
        placed = {id(array): engine.place(array) for array in leaves_of((X, y))}
        self._of_rank = [
            map_leaves((X, y), partial(_of_rank, placed, number)) for number in range(len(engine.local_ranks))
        ]

    def batches(self, order: Array, batch_size: int, split: Split, epoch: int = 0) -> Iterator[Batch]:
        take, places = self._engine.backend.take, self._engine.place(order)
        for first in range(0, len(order), batch_size):

            def fetch(rank: int, start: int, stop: int, first: int = first) -> tuple[Any, Any]:
                number = self._engine.local_ranks.index(rank)

                def gather(tensor: Tensor) -> Tensor:
                    return take(tensor, places[number], first + start, first + stop)

                X, y = map_leaves(self._of_rank[number], gather)
                return X, y

            yield Batch(min(batch_size, len(order) - first), fetch)

    def close(self) -> None:
        """Nothing was started."""


def _of_rank(placed: dict[int, list[Tensor]], number: int, array: Array) -> Tensor:
    return placed[id(array)][number]
