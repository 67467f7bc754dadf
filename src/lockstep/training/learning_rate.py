"""The learning rate of a step, for those who watch a run."""

from lockstep.config import RunConfig
from lockstep.optim.lr_schedule import LRSchedule
from lockstep.replicas.replica import Replica


def learning_rate_at(config: RunConfig, replica: Replica, step: int, num_steps: int) -> float | None:
    """By the run's settings; by the replica's optimizer, where it can tell: a user's own has other ones.

    None where neither knows.
    """
    of_replica = getattr(replica, "learning_rate", None)
    if of_replica is not None and (found := of_replica(step)) is not None:
        return float(found)
    if config.learning_rate is None:
        return None
    return config.learning_rate * LRSchedule(config.schedule, config.warmup, num_steps).factor(step)
