"""What to say when a shard does not fit into a device's memory: which number of shards would, found by trying."""

import traceback

from lockstep.backends import flat
from lockstep.core.errors import OutOfMemory, PeerFailure
from lockstep.core.source_lines import user_source_line
from lockstep.replicas.replica import AllGatherTensors, Replica, Shard
from lockstep.runtime.engine import Rank, StepInput
from lockstep.runtime.transport import Cancelled


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: frameworks say so in different ways."""
    said = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(
        words in said for words in ("outofmemory", "out of memory", "can't allocate memory", "resource_exhausted")
    )


class OutOfMemoryCause:
    """An out-of-memory error, without the memory that its frames hold."""

    def __init__(self, problem: BaseException) -> None:
        self._source_line, self._said = user_source_line(problem), str(problem)
        traceback.clear_frames(problem.__traceback__)

    def to_error(
        self, rank: Rank, replica: Replica | None, work: StepInput, num_samples: int, all_gather: AllGatherTensors
    ) -> OutOfMemory:
        """The error to end with, for a shard of `num_samples`; without a replica, nothing is tried."""
        advice = self._what_would_fit(rank, replica, work, num_samples, all_gather)
        return OutOfMemory(rank.number, rank.device, num_samples, advice, self._said, self._source_line)

    def _what_would_fit(
        self, rank: Rank, replica: Replica | None, work: StepInput, num_samples: int, all_gather: AllGatherTensors
    ) -> str:
        batch = work.batch
        more = f"More shards need less of it: try --shards {-(-2 * batch.num_samples // num_samples)}"
        if replica is None:
            return more

        def try_a_shard(num_samples: int, num_vectors: int) -> None:
            X, y = batch.fetch(rank.number, 0, num_samples)
            shards = [Shard(0, num_samples, X, y)]
            (leaf,) = replica.forward_backward(shards, all_gather)
            vectors = [rank.backend.copy_to(flat(leaf.gradient), rank.device) for _ in range(num_vectors)]
            replica.forward_backward(shards, all_gather)
            vectors.clear()

        while num_samples > 1:
            num_samples = -(-num_samples // 2)
            fits = -(-batch.num_samples // num_samples)
            try:  # beside as many vectors as a step has at most: nodes of the tree, the total, the optimizer's
                try_a_shard(num_samples, fits.bit_length() + 5)
            except (Cancelled, PeerFailure):  # it cannot be tried without the other ranks
                return more
            except Exception as problem:  # without memory, other things go wrong too
                traceback.clear_frames(problem.__traceback__)  # they hold what was computed so far
            else:
                return f"A shard of {num_samples} does: use --shards {fits} (this changes the weights)"
        return "Not even one sample does: use a smaller model, smaller samples, or a device with more memory"
