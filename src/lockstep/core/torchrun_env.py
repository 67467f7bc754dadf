"""Whether torchrun started this process, and which of the run's ranks it has; no framework is loaded to find out."""

import os
from typing import NamedTuple


class TorchrunEnv(NamedTuple):
    """What torchrun says in the environment of a process that it started."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    attempt: str  # what sets one start of all processes apart from the next
    is_restarted: bool


def torchrun_env() -> TorchrunEnv | None:
    """Torchrun's environment of this process; None where it was not started by torchrun."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "RANK" not in env:
        return None
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return TorchrunEnv(
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        local_rank=int(env["LOCAL_RANK"]),
        local_size=int(env["LOCAL_WORLD_SIZE"]),
        host=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        attempt=f"{env.get('TORCHELASTIC_RUN_ID', '')}/{restarts}/{env['WORLD_SIZE']}",
        is_restarted=restarts != "0",
    )


def prints_result() -> bool:
    """Whether this process is the one of the run that prints: all of them come to the same result."""
    env = torchrun_env()
    return env is None or env.rank == 0
