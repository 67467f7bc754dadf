"""The engine of a `Trainer`: threads of this process, or the processes that torchrun has started."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from lockstep.backends import devices_for, load_backend
from lockstep.config import RunConfig, check_ranks
from lockstep.core.errors import ConfigError
from lockstep.core.secret import secret_for
from lockstep.core.torchrun_env import TorchrunEnv, torchrun_env
from lockstep.partition.grid import num_devices_of
from lockstep.runtime.engine import Engine
from lockstep.runtime.inprocess import InProcess
from lockstep.training.setup import check_portable
from lockstep.training.task import grid_of


@contextmanager
def trainer_engine(config: RunConfig) -> Iterator[Engine]:
    """An engine without a session of its own: the trainer has one in every call."""
    backend = load_backend(config.backend)
    check_portable(config, backend)
    with ExitStack() as undo:
        if env := torchrun_env():
            yield undo.enter_context(_torchrun_engine(config, env))
            return
        if config.engine == "processes":
            hint = "Start your program with torchrun for a process on each device, or leave engine= out"
            raise ConfigError(f"A Trainer runs your own loop, which forked processes cannot share. {hint}.")
        wanted = config.devices if config.devices is not None else num_devices_of(config.split)
        devices = devices_for(backend, wanted, at_most=config.num_shards)
        check_ranks(grid_of(config, len(devices)).data, config.num_shards)
        with backend.session(devices):
            engine = undo.enter_context(InProcess(backend, devices, config.timeout, has_session=False))
        yield engine


@contextmanager
def _torchrun_engine(config: RunConfig, env: TorchrunEnv) -> Iterator[Engine]:
    from lockstep.runtime.process_group import ProcessGroup
    from lockstep.runtime.processes import Processes
    from lockstep.runtime.store import address_towards
    from lockstep.training.torchrun import devices_of_all, store_of

    backend = load_backend(config.backend)
    number = _NUM_OPENED[0] = _NUM_OPENED[0] + 1  # every process opens its trainers in the same order
    store = store_of(env, config.timeout, f"/trainer/{number}")
    devices = devices_of_all(replace(config, engine="processes"), env, store)
    check_ranks(grid_of(config, len(devices)).data, config.num_shards)
    secret = secret_for(f"torchrun/{env.attempt}/trainer {number}")
    group = ProcessGroup(store, env.rank, devices, address_towards(env.host), config.timeout, secret)
    with backend.session([devices[env.rank]]):
        engine = Processes(backend, devices, group, has_session=False)
        engine.__enter__()
    with engine:
        yield engine


_NUM_OPENED = [0]  # trainers of this process
