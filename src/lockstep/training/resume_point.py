"""Where a run starts, where it saves, and how it is stopped."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.training.checkpoint import Checkpoint, Checkpoints


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts, where it saves, and how it is stopped."""

    checkpoint: Checkpoint | None = None  # None: at step 1
    notes: list[str] = field(default_factory=list)  # shown to the user when it starts
    num_restarts: int = 0  # times that it continued with other workers
    checkpoints: Checkpoints | None = None  # where to save; None on ranks that do not
    is_stopping: Callable[[], bool] = lambda: False  # whether the user has asked it to stop
