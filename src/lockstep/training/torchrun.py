"""A run whose processes were started by torchrun, on one machine or on several: this process has one of the ranks.

When one of them fails, all of them end. With `torchrun --max-restarts`, all are started anew, and the run goes on after
its last checkpoint, with as many processes as there are then.
"""

import time
from dataclasses import replace

from lockstep.backends import devices_for, load_backend
from lockstep.training.checkpoint import identity_of
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.training.elastic import agree
from lockstep.runtime.process_group import Group, address_towards, join_store, store_under
from lockstep.runtime.processes import Processes
from lockstep.runtime.launch.heartbeat import Store, Whereabouts, ask, find_late
from lockstep.training.loop import Start, Training
from lockstep.core.errors import ConfigError, Interrupted, LockstepError, PeersLost, RunError
from lockstep.core.interrupts import Interrupts
from lockstep.core.torchrun_env import Place
from lockstep.training.setup import Prepared, prepare
from lockstep.report.console import fetch_progress
from lockstep.report.events import Result
from lockstep.report.runlog import RunLog
from lockstep.training.reporting import report
from lockstep.partition.balance import balance_for
from lockstep.training.resume import find_start
from lockstep.training.task import Given

STORE_SECONDS = 3.0  # for the store to answer when others are lost: the way to it may be cut


def store_of(place: Place, timeout: float) -> Store:
    """A connection to torchrun's own store."""
    return store_under(f"lockstep/{place.attempt}", join_store(place.host, place.port, timeout))


def train_under_torchrun(config: RunConfig, place: Place, given: Given | None, quiet: bool, resume: bool) -> Result:
    """This process's part of the run; every rank gets the result."""
    store, whereabouts = store_of(place, config.timeout), Whereabouts()
    devices: list[Device] = []
    with Interrupts(says=not quiet and place.rank == 0) as interrupts:
        try:
            devices = devices_of_all(config, place, store)
            whereabouts.tell(store_of(place, config.timeout), str(place.rank))
            return _take_part(config, place, devices, store, whereabouts, given, quiet, resume, interrupts)
        except LockstepError as problem:
            said: LockstepError = problem
            if isinstance(problem, PeersLost) and interrupts.requested:
                said = Interrupted("interrupted.")
            elif isinstance(problem, PeersLost):
                said = _who_is_lost(problem, store, devices, place)
            said.is_said = False if said.is_said is False else is_said(store)
            raise said from problem.__cause__
        finally:
            whereabouts.stop()


def _take_part(
    config: RunConfig,
    place: Place,
    devices: list[Device],
    store: Store,
    whereabouts: Whereabouts,
    given: Given | None,
    quiet: bool,
    resume: bool,
    interrupts: Interrupts,
) -> Result:
    resume = resume or (place.is_restarted and config.out is not None)
    log = RunLog(config.out, is_resumed=resume) if place.rank == 0 and config.out is not None else None
    with fetch_progress() as progress:
        prepared = prepare(config, given, progress, devices=devices)
    try:
        start = Start()
        if log is not None:
            log.claim()
            start = find_start(config, prepared, resume)
        meet(store, place, config.timeout, interrupts)
        group = Group(store, place.rank, devices, address_towards(place.host), config.timeout)
        balance = balance_for(config.balance)
        with Processes(
            prepared.backend, devices, group, config.exchange, balance, whereabouts, config.bucket_mb
        ) as engine:
            check_same_settings(engine, config, prepared)
            start = replace(
                start,
                checkpoint=agree(engine, start.checkpoint),
                is_stopping=lambda: place.rank == 0 and interrupts.requested,
            )
            training = Training(config, prepared, engine, start)
            try:
                return report(training.events(), log, quiet or place.rank != 0)
            except PeersLost:
                if interrupts.requested and place.rank == 0:
                    raise training.save_and_stop() from None
                raise
    finally:
        if log is not None:
            log.close()


def devices_of_all(config: RunConfig, place: Place, store: Store) -> list[Device]:
    """The device of every rank; each takes the one of its machine that has its local rank."""
    if config.devices is not None and config.devices not in (place.size, str(place.size)):
        names = str(config.devices).split(",")
        if len(names) != place.local_size:
            raise ConfigError(
                f"torchrun has started {place.size} processes, {place.local_size} of them on this machine, and "
                f"--devices is {config.devices}. Leave it out, or name {place.local_size} devices."
            )
    else:
        names = [str(place.local_size)]
    own = devices_for(load_backend(config.backend), ",".join(names))[place.local_rank]
    store.set(f"device/{place.rank}", str(own))
    try:
        devices = [Device(store.get(f"device/{rank}").decode()) for rank in range(place.size)]
    except RuntimeError as problem:
        raise PeersLost(f"Not all of the {place.size} ranks have come within {config.timeout:g} s.") from problem
    if len({device.kind for device in devices}) > 1:
        raise ConfigError(
            f"The machines have devices of two kinds, {', '.join(devices)}: their kernels round differently. Name "
            f"logical CPU devices on all of them: --devices cpu:0,cpu:1."
        )
    return devices


def meet(store: Store, place: Place, timeout: float, interrupts: Interrupts) -> None:
    """Waits until all ranks are ready to connect: one that fails before would be waited for until the deadline."""
    deadline = time.monotonic() + timeout
    store.add("ready", 1)
    while store.add("ready", 0) < place.size:
        if interrupts.requested or store.add("failed", 0):
            raise PeersLost("Another rank has failed.")
        if time.monotonic() > deadline:
            lost = PeersLost("Not all ranks have come.")
            lost.is_late = True
            raise lost
        time.sleep(0.02)


def check_same_settings(engine: Processes, config: RunConfig, prepared: Prepared) -> None:
    """Refuses ranks that were started with other settings or data than rank 0."""
    task, names = prepared.task, ("num_epochs", "exchange", "balance", "checkpoint_every", "check_every", "heal")
    own = identity_of(config, task.data_sha256, task.num_train) | {name: getattr(config, name) for name in names}
    for rank, other in enumerate(all_of_them := engine.gather([own])):
        differing = [name for name in own if other[name] != all_of_them[0][name]]
        if differing:
            raise ConfigError(
                f"Rank {rank} was started with another {', '.join(differing).replace('_', ' ')} than rank 0. Give all "
                f"machines the same settings and the same data."
            )


def _who_is_lost(lost: PeersLost, store: Store, devices: list[Device], place: Place) -> RunError:
    if not devices:
        return RunError(f"rank {place.rank}: {str(lost).rstrip('.')}. Go on with --resume.")
    is_cut = False
    try:
        names = [str(rank) for rank in range(place.size)]
        _, said = ask(lambda: find_late(store, names, list(devices), place.rank), STORE_SECONDS)
    except RuntimeError:
        is_cut = True
        said = "the meeting point of all processes cannot be reached, so other machines, or the way to them, are gone"
    what = "in an exchange, others did not arrive" if lost.is_late else "in an exchange, others were lost"
    error = RunError(f"rank {place.rank} ({devices[place.rank]}), {what}: {said or lost}. Go on with --resume.")
    if is_cut:
        error.is_said = False  # nobody can be asked
    return error


def is_said(store: Store) -> bool:
    """Whether another rank has said already what went wrong; this one has from now on."""
    try:
        return ask(lambda: store.add("failed", 1), STORE_SECONDS) > 1
    except RuntimeError:
        return False
