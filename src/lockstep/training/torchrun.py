"""A run whose processes were started by torchrun, on one machine or several: this process is one of the ranks.

When one fails, all end. `torchrun --max-restarts` restarts all, and the run resumes from its last checkpoint.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count

from lockstep.backends import devices_for, load_backend
from lockstep.config import RunConfig, settings_in
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError, Interrupted, LockstepError, PeerFailure, RunError
from lockstep.core.interrupts import Interrupts
from lockstep.core.secret import secret_for
from lockstep.core.settings import AGREED
from lockstep.core.torchrun_env import TorchrunEnv, torchrun_env
from lockstep.report.events import Result
from lockstep.runtime.authenticated_store import AuthenticatedStore
from lockstep.runtime.engine import Position
from lockstep.runtime.launch.heartbeat import Heartbeat, ask, find_stragglers
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.processes import Processes
from lockstep.runtime.rank_thread import run_watched
from lockstep.runtime.store import Store, address_towards, join_store, prefix_store
from lockstep.training.auto_split import with_split
from lockstep.training.checkpoint import identity_of
from lockstep.training.elastic import agree
from lockstep.training.loop import Training
from lockstep.training.resume import opened_run
from lockstep.training.run import report
from lockstep.training.task import Task, UserObjects

MARK_SECONDS = 5.0  # for the first rank with an error to say that it prints it
PRINT_SECONDS = 0.5  # for it to print: torchrun ends all ranks as soon as one of them has ended
LATE_SECONDS = 2.0  # for Gloo to notice by itself that its time is over: it may wait for a dead rank for ever
NUMBERS = count()  # of the runs of this process: the store keeps what earlier ones have written
STORE_SECONDS = 3.0  # for the store to answer when peers have failed: the connection to it may be broken


def store_of(env: TorchrunEnv, timeout: float, part: str = "") -> Store:
    """A connection to torchrun's own store, which anybody can write to: what has no mark of the secret is not read."""
    store = prefix_store(f"lockstep/{env.attempt}{part}", join_store(env.host, env.port, timeout))
    secret = secret_for(f"torchrun/{env.attempt}{part}/store")
    return store if secret is None else AuthenticatedStore(store, secret, timeout)


class TorchrunRank:
    """One of the processes that torchrun started."""

    def __init__(self, config: RunConfig, env: TorchrunEnv, quiet: bool) -> None:
        self._config, self._env, self._quiet = config, env, quiet or env.rank != 0
        number = next(NUMBERS)
        self._part = f"/run/{number}" if number else ""
        self._store = store_of(env, config.timeout, self._part)
        self._position = Position()
        self._devices: list[Device] = []

    def train(self, objects: UserObjects | None, resume: bool) -> Result:
        """The result of the run, the same on every rank; an error is printed by the first rank that has one."""
        config, env = self._config, self._env
        resume = resume or (env.is_restarted and config.out is not None)
        with Interrupts(notify=not self._quiet) as interrupts, ExitStack() as undo:
            try:
                self._devices = devices_of_all(config, env, self._store)
                undo.callback(Heartbeat(self._position, store_of(env, config.timeout, self._part), str(env.rank)).stop)
                return self._train(objects, resume, interrupts)
            except LockstepError as problem:
                error: LockstepError = problem
                if isinstance(problem, PeerFailure):
                    error = Interrupted("interrupted.") if interrupts.requested else self._name_failed_peers(problem)
                    error.ends_at_once = problem.ends_at_once
                if error.is_reported is None:
                    error.is_reported = is_reported(self._store)
                raise error from problem.__cause__

    def _train(self, objects: UserObjects | None, resume: bool, interrupts: Interrupts) -> Result:
        rank = self._env.rank
        least = partial(least_of_all, self._store, self._env, self._config.timeout, interrupts)
        config, objects, notes = with_split(self._config, objects, self._devices, least)
        with opened_run(config, objects, resume, self._devices, logs=rank == 0) as (prepared, log, start):
            wait_for_all(self._store, self._env, config.timeout, interrupts)
            address = address_towards(self._env.host)
            secret = secret_for(f"torchrun/{self._env.attempt}{self._part}")

            def connect() -> ProcessGroup:
                return ProcessGroup(self._store, rank, self._devices, address, config.timeout, secret)

            watch = watch_peers(self._store, self._env, config.timeout + LATE_SECONDS, interrupts)
            group = run_watched("lockstep-connect", connect, watch)
            with Processes(prepared.backend, self._devices, group, self._position) as engine:
                check_same_settings(engine, config, prepared.task)
                checkpoint = agree(engine, start, identity_of(config, prepared.task), prepared.task)
                start = replace(
                    start,
                    checkpoint=checkpoint,
                    notes=[*notes, *start.notes],
                    is_stopping=lambda: rank == 0 and interrupts.requested,
                )
                return report(Training(config, prepared, engine, start).events(), log, self._quiet)

    def _name_failed_peers(self, failure: PeerFailure) -> RunError:
        rank, devices = self._env.rank, self._devices
        if not devices:
            return RunError(f"rank {rank}: {failure}")
        names, is_reported = list(map(str, range(self._env.size))), None
        try:
            _, cause = ask(lambda: find_stragglers(self._store, names, devices, rank), STORE_SECONDS)
        except RuntimeError:
            cause = "the store of all processes cannot be reached: other machines, or the connection to them, are gone"
            is_reported = False  # the store would know
        what = "peers did not arrive" if failure.timed_out else "peers failed"
        error = RunError(
            f"rank {rank} ({devices[rank]}), in an exchange, {what}: {cause or failure}. Resume with --resume."
        )
        error.is_reported = is_reported
        return error


def devices_of_all(config: RunConfig, env: TorchrunEnv, store: Store) -> list[Device]:
    """The device of every rank; each takes the device of its local rank on its machine."""
    wanted = str(env.local_size)
    if config.devices is not None and str(config.devices) != str(env.size):
        wanted = str(config.devices)
        if len(wanted.split(",")) != env.local_size:
            started = f"torchrun has started {env.size} processes, {env.local_size} of them on this machine"
            hint = f"Leave it out, or name {env.local_size} devices"
            raise ConfigError(f"{started}, and --devices is {wanted}. {hint}.")
    own = devices_for(load_backend(config.backend), wanted)[env.local_rank]
    store.set(f"device/{env.rank}", str(own))
    try:
        devices = [_device(store.get(f"device/{rank}")) for rank in range(env.size)]
    except RuntimeError as problem:
        hint = "Start torchrun on every machine, or use a larger --timeout"
        raise PeerFailure(f"Not all of the {env.size} ranks started within {config.timeout:g} s. {hint}.") from problem
    if len({device.kind for device in devices}) > 1:
        hint = "their kernels round differently. Use logical CPU devices on all of them: --devices cpu:0,cpu:1"
        raise ConfigError(f"The machines have devices of two kinds, {', '.join(devices)}: {hint}.")
    return devices


def _device(said: bytes) -> Device:
    """A device that another rank has named, in a store that anybody can write to."""
    try:
        return Device(said[:32].decode("ascii"))
    except (UnicodeDecodeError, LockstepError) as problem:
        raise PeerFailure("A rank's entry in torchrun's store is no device: another program writes to it.") from problem


def wait_for_all(
    store: Store, env: TorchrunEnv, timeout: float, interrupts: Interrupts, what: str = "ready", value: str = ""
) -> list[bytes]:
    """Waits until all ranks are here, or one has failed: to connect to it would end with a timeout. Their values."""
    watch = watch_peers(store, env, timeout, interrupts)
    store.set(f"{what}/{env.rank}", value)
    keys = [f"{what}/{rank}" for rank in range(env.size)]
    while not store.check(keys):
        watch()
    return [store.get(key) for key in keys]


def least_of_all(store: Store, env: TorchrunEnv, timeout: float, interrupts: Interrupts, memory: float) -> float:
    """The least memory that a rank has: machines may differ, and all have to come to the same split."""
    said = wait_for_all(store, env, timeout, interrupts, "memory", str(int(memory)))
    if not all(number[:32].isdigit() for number in said):
        raise PeerFailure("A rank's memory in torchrun's store is no number: another program writes to it.")
    return float(min(int(number[:32]) for number in said))


def watch_peers(store: Store, env: TorchrunEnv, timeout: float, interrupts: Interrupts) -> Callable[[], None]:
    """A function to call while this rank waits: it waits a moment, and gives up where another failed, or in the end."""
    deadline = time.monotonic() + timeout

    def watch() -> None:
        has_failed = any(store.check([f"failed/{rank}"]) for rank in range(env.size))
        if interrupts.requested or has_failed or time.monotonic() > deadline:
            failure = PeerFailure("Another rank has failed." if has_failed else "Not all ranks are ready.")
            failure.timed_out = not has_failed
            raise failure
        time.sleep(0.02)

    return watch


def check_same_settings(engine: Processes, config: RunConfig, task: Task) -> None:
    """Refuses ranks that were started with other settings or data than rank 0."""
    own = identity_of(config, task) | {each.name: getattr(config, each.name) for each in settings_in(AGREED)}
    gathered = engine.all_gather([own])
    for rank, other in enumerate(gathered):
        if differing := [name.replace("_", " ") for name in own if other[name] != gathered[0][name]]:
            raise ConfigError(f"Rank {rank} has another {', '.join(differing)} than rank 0. Give all ranks the same.")


def is_reported(store: Store) -> bool:
    """Whether another rank has printed what went wrong; marks it as printed.

    The count of those that failed is a hint only: who changes it makes all of them wait, and print.
    """
    env = torchrun_env()

    def find_mark() -> bool:
        store.set(f"failed/{env.rank if env else 0}", "")
        deadline = time.monotonic() + (MARK_SECONDS if store.add("failed", 1) > 1 else 0.0)
        while time.monotonic() < deadline:
            if store.check(["printed"]):
                time.sleep(PRINT_SECONDS)
                return True
            time.sleep(0.02)
        store.set("printed", "")
        return False

    try:
        return ask(find_mark, STORE_SECONDS + MARK_SECONDS)
    except RuntimeError:
        return False
