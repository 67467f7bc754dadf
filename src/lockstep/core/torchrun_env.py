"""Whether torchrun started this process, or a program that works like it, and as which rank.

No framework is loaded to find out. Ray Train's TorchTrainer sets the same variables and, instead of torchrun's own
store, a process group: the store that its ranks have met at is at the same address.
"""

import os
import sys
from typing import NamedTuple

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    is_torchrun = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "RANK" in env
    if not is_torchrun and not (all(name in env for name in VARIABLES) and has_process_group()):
        return None
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank, size, local_rank, local_size, port = (
        int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    )
    attempt = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{restarts}/{size}"
    return TorchrunEnv(rank, size, local_rank, local_size, env["MASTER_ADDR"], port, attempt, restarts != "0")


def has_process_group() -> bool:
    """Whether this program has joined a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def prints_result() -> bool:
    """Whether this process prints the result of the run, which all of its processes have."""
    env = torchrun_env()
    return env is None or env.rank == 0
