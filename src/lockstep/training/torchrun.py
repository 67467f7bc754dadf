"""A run whose processes were started by torchrun, on one machine or on several: this process has one of the ranks.

When one of them fails, all of them end. With `torchrun --max-restarts`, all are restarted, and the run resumes from its
last checkpoint, with as many processes as there are then.
"""

import time
from contextlib import ExitStack
from dataclasses import replace

from lockstep.backends import devices_for, load_backend
from lockstep.config import RunConfig, settings_in
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError, Interrupted, LockstepError, PeerFailure, RunError
from lockstep.core.interrupts import Interrupts
from lockstep.core.settings import AGREED
from lockstep.core.torchrun_env import TorchrunEnv
from lockstep.report.console import fetch_progress
from lockstep.report.events import Result
from lockstep.report.runlog import RunLog
from lockstep.runtime.engine import Position
from lockstep.runtime.launch.heartbeat import Heartbeat, ask, find_stragglers
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.processes import Processes
from lockstep.runtime.store import Store, address_towards, join_store, prefix_store
from lockstep.training.checkpoint import identity_of
from lockstep.training.elastic import agree
from lockstep.training.loop import ResumePoint, Training
from lockstep.training.resume import find_resume_point
from lockstep.training.run import report
from lockstep.training.setup import Prepared, prepare
from lockstep.training.task import UserObjects

STORE_SECONDS = 3.0  # for the store to answer when peers have failed: the connection to it may be cut


def store_of(env: TorchrunEnv, timeout: float) -> Store:
    """A connection to torchrun's own store."""
    return prefix_store(f"lockstep/{env.attempt}", join_store(env.host, env.port, timeout))


def train_under_torchrun(
    config: RunConfig, env: TorchrunEnv, objects: UserObjects | None, quiet: bool, resume: bool
) -> Result:
    """This process's part of the run; every rank gets the result."""
    return TorchrunRank(config, env, quiet).train(objects, resume or (env.is_restarted and config.out is not None))


class TorchrunRank:
    """One of the processes that torchrun started."""

    def __init__(self, config: RunConfig, env: TorchrunEnv, quiet: bool) -> None:
        self._config, self._env, self._quiet = config, env, quiet or env.rank != 0
        self._store = store_of(env, config.timeout)
        self._position = Position()
        self._devices: list[Device] = []

    def train(self, objects: UserObjects | None, resume: bool) -> Result:
        """The result; an error is printed by the first rank that has one."""
        with Interrupts(notify=not self._quiet) as interrupts, ExitStack() as undo:
            try:
                self._devices = devices_of_all(self._config, self._env, self._store)
                heartbeat_store = store_of(self._env, self._config.timeout)
                undo.callback(Heartbeat(self._position, heartbeat_store, str(self._env.rank)).stop)
                return self._train(objects, resume, interrupts)
            except LockstepError as problem:
                said: LockstepError = problem
                if isinstance(problem, PeerFailure) and interrupts.requested:
                    said = Interrupted("interrupted.")
                elif isinstance(problem, PeerFailure):
                    said = self._name_failed_peers(problem)
                said.is_reported = False if said.is_reported is False else is_reported(self._store)
                raise said from problem.__cause__

    def _train(self, objects: UserObjects | None, resume: bool, interrupts: Interrupts) -> Result:
        config, rank = self._config, self._env.rank
        log = RunLog(config.out, is_resumed=resume) if rank == 0 and config.out is not None else None
        with fetch_progress() as progress:
            prepared = prepare(config, objects, progress, devices=self._devices)
        with ExitStack() as undo:
            start = ResumePoint()
            if log is not None:
                undo.callback(log.close)
                log.claim()
                start = find_resume_point(config, prepared, resume)
            wait_for_all(self._store, self._env, config.timeout, interrupts)
            address = address_towards(self._env.host)
            group = ProcessGroup(self._store, rank, self._devices, address, config.timeout)
            with Processes(prepared.backend, self._devices, group, self._position) as engine:
                check_same_settings(engine, config, prepared)
                start = replace(
                    start,
                    checkpoint=agree(engine, start.checkpoint),
                    is_stopping=lambda: rank == 0 and interrupts.requested,
                )
                training = Training(config, prepared, engine, start)
                try:
                    return report(training.events(), log, self._quiet)
                except PeerFailure:
                    if interrupts.requested and rank == 0:
                        raise training.save_and_stop() from None
                    raise

    def _name_failed_peers(self, failure: PeerFailure) -> RunError:
        rank, devices = self._env.rank, self._devices
        if not devices:
            return RunError(f"rank {rank}: {str(failure).rstrip('.')}. Resume with --resume.")
        is_cut = False
        try:
            names = [str(rank) for rank in range(self._env.size)]
            _, said = ask(lambda: find_stragglers(self._store, names, devices, rank), STORE_SECONDS)
        except RuntimeError:
            is_cut = True
            said = (
                "the store of all processes cannot be reached, so other machines, or the connection to them, are gone"
            )
        what = "in an exchange, peers did not arrive" if failure.timed_out else "in an exchange, peers failed"
        error = RunError(f"rank {rank} ({devices[rank]}), {what}: {said or failure}. Resume with --resume.")
        if is_cut:
            error.is_reported = False  # nobody can be asked
        return error


def devices_of_all(config: RunConfig, env: TorchrunEnv, store: Store) -> list[Device]:
    """The device of every rank; each takes the one of its machine that has its local rank."""
    if config.devices is not None and config.devices not in (env.size, str(env.size)):
        names = str(config.devices).split(",")
        if len(names) != env.local_size:
            raise ConfigError(
                f"torchrun has started {env.size} processes, {env.local_size} of them on this machine, and "
                f"--devices is {config.devices}. Leave it out, or name {env.local_size} devices."
            )
    else:
        names = [str(env.local_size)]
    own = devices_for(load_backend(config.backend), ",".join(names))[env.local_rank]
    store.set(f"device/{env.rank}", str(own))
    try:
        devices = [Device(store.get(f"device/{rank}").decode()) for rank in range(env.size)]
    except RuntimeError as problem:
        raise PeerFailure(f"Not all of the {env.size} ranks have arrived within {config.timeout:g} s.") from problem
    if len({device.kind for device in devices}) > 1:
        raise ConfigError(
            f"The machines have devices of two kinds, {', '.join(devices)}: their kernels round differently. Name "
            f"logical CPU devices on all of them: --devices cpu:0,cpu:1."
        )
    return devices


def wait_for_all(store: Store, env: TorchrunEnv, timeout: float, interrupts: Interrupts) -> None:
    """Waits until all ranks are ready to connect: one that fails before would be waited for until the deadline."""
    deadline = time.monotonic() + timeout
    store.add("ready", 1)
    while store.add("ready", 0) < env.size:
        if interrupts.requested or store.add("failed", 0):
            raise PeerFailure("Another rank has failed.")
        if time.monotonic() > deadline:
            failure = PeerFailure("Not all ranks have arrived.")
            failure.timed_out = True
            raise failure
        time.sleep(0.02)


def check_same_settings(engine: Processes, config: RunConfig, prepared: Prepared) -> None:
    """Refuses ranks that were started with other settings or data than rank 0."""
    task = prepared.task
    own = identity_of(config, task.data_sha256, task.num_train)
    own |= {each.name: getattr(config, each.name) for each in settings_in(AGREED)}
    for rank, other in enumerate(all_of_them := engine.all_gather([own])):
        differing = [name for name in own if other[name] != all_of_them[0][name]]
        if differing:
            raise ConfigError(
                f"Rank {rank} was started with another {', '.join(differing).replace('_', ' ')} than rank 0. Give all "
                f"machines the same settings and the same data."
            )


def is_reported(store: Store) -> bool:
    """Whether another rank has printed already what went wrong; this one has from now on."""
    try:
        return ask(lambda: store.add("failed", 1), STORE_SECONDS) > 1
    except RuntimeError:
        return False
