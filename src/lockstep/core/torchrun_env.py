"""Whether torchrun started this process, and as which rank; no framework is loaded to find out."""

import os
from typing import NamedTuple


class TorchrunEnv(NamedTuple):
    """The environment of a process that torchrun started."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    attempt: str  # differs between one start of all processes and the next
    is_restarted: bool


def torchrun_env() -> TorchrunEnv | None:
    """Torchrun's environment of this process; None where it was not started by torchrun."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "RANK" not in env:
        return None
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank, size, local_rank, local_size, port = (
        int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    )
    attempt = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{restarts}/{size}"
    return TorchrunEnv(rank, size, local_rank, local_size, env["MASTER_ADDR"], port, attempt, restarts != "0")


def prints_result() -> bool:
    """Whether this process prints the result of the run, which all of its processes have."""
    env = torchrun_env()
    return env is None or env.rank == 0
