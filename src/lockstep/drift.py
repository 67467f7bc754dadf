"""Replicas must be equal to the bit. They are compared by hash; one that differs is named, and healed if that is asked.

What makes a replica drift is outside of the program: a bit that flipped in memory, a failing device, or code of the
user's own that treats devices differently.
"""

from collections import Counter
from collections.abc import Generator

from lockstep.config import RunConfig
from lockstep.device import Device
from lockstep.engines import Engine, Replica
from lockstep.errors import RunError
from lockstep.packing import pack, unpack
from lockstep.report.events import Incident
from lockstep.task import Task


def compare_replicas(
    engine: Engine, replicas: list[Replica], task: Task, config: RunConfig, step: int
) -> Generator[Incident, None, None]:
    """Finds replicas that differ from most of the others; restores them, or ends the run, as the user chose."""
    if engine.num_ranks == 1:
        return
    own = engine.each("comparison of replicas", lambda rank, device, replica: replica.fingerprints(), replicas)
    found = [tuple(of_rank) for of_rank in engine.gather(own)]
    votes = Counter(found)
    if len(votes) == 1:
        return
    usual, num_votes = votes.most_common(1)[0]
    names = list(task.initial)

    def described(rank: int, other: tuple[str, ...]) -> str:
        first = next(name for name, ours, theirs in zip(names, found[rank], other, strict=True) if ours != theirs)
        return f"rank {rank} ({engine.devices[rank]}), first in {first}"

    if 2 * num_votes <= engine.num_ranks:
        rank = next(rank for rank in range(engine.num_ranks) if found[rank] != found[0])
        raise RunError(
            f"step {step}: the replicas are not equal any more: {described(rank, found[0])}, differs from rank 0. Most "
            f"would have to agree to know who is right. Go on from the last checkpoint (--resume); if it happens "
            f"again, look for a failing device, or for code of your own that treats devices differently."
        )
    different = [rank for rank in range(engine.num_ranks) if found[rank] != usual]
    named = "; ".join(described(rank, usual) for rank in different)
    if not config.heal:
        raise RunError(
            f"step {step}: a replica is not equal to the others any more: {named}. Go on from the last checkpoint "
            f"(--resume), or let it be restored from the others when it happens (--heal)."
        )
    good = found.index(usual)

    def state() -> bytes:
        replica = replicas[engine.local_ranks.index(good)]
        return pack({"weights": replica.arrays(), "memory": replica.memory()})

    healthy = unpack(engine.share(good, state))

    def restored(rank: int, device: Device, replica: Replica) -> Replica:
        return task.replica(device, healthy["weights"], healthy["memory"]) if rank in different else replica

    replicas[:] = engine.each("healing", restored, replicas)
    yield Incident("healed", f"step {step}: restored from rank {good} a replica that differed: {named}")
