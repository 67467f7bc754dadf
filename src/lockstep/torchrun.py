"""A run whose processes were started by torchrun, on one machine or on several: this process has one of the ranks.

When one of them fails, all of them end. With `torchrun --max-restarts`, all are started anew, and the run goes on after
its last checkpoint, with as many processes as there are then.
"""

from dataclasses import replace

from lockstep.backends import devices_for, load_backend
from lockstep.config import RunConfig
from lockstep.device import Device
from lockstep.elastic import agree
from lockstep.engines.group import Group, address_towards, join_store, store_under
from lockstep.engines.processes import Processes
from lockstep.engines.whereabouts import Store, Whereabouts, find_late
from lockstep.epochs import Start, Training
from lockstep.errors import ConfigError, Interrupted, LockstepError, PeersLost, RunError
from lockstep.interrupts import Interrupts
from lockstep.launched import Place
from lockstep.prepare import prepare
from lockstep.report.console import fetch_progress
from lockstep.report.events import Result
from lockstep.report.runlog import RunLog
from lockstep.reporting import report
from lockstep.split.balance import balance_for
from lockstep.starting import find_start
from lockstep.task import Given


def store_of(place: Place, timeout: float) -> Store:
    """A connection to torchrun's own store."""
    return store_under(f"lockstep/{place.attempt}", join_store(place.host, place.port, timeout))


def train_under_torchrun(config: RunConfig, place: Place, given: Given | None, quiet: bool, resume: bool) -> Result:
    """This process's part of the run; every rank gets the result."""
    store, whereabouts = store_of(place, config.timeout), Whereabouts()
    devices = devices_of_all(config, place, store)
    whereabouts.tell(store_of(place, config.timeout), str(place.rank))
    with Interrupts() as interrupts:
        try:
            return _take_part(config, place, devices, store, whereabouts, given, quiet, resume, interrupts)
        except LockstepError as problem:
            said: LockstepError = problem
            if isinstance(problem, PeersLost) and interrupts.requested:
                said = Interrupted("interrupted.")
            elif isinstance(problem, PeersLost):
                said = _who_is_lost(problem, store, devices, place)
            said.is_said = _is_said(store)
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
        group = Group(store, place.rank, devices, address_towards(place.host), config.timeout)
        balance = balance_for(config.balance)
        with Processes(prepared.backend, devices, group, config.exchange, balance, whereabouts) as engine:
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
    devices = [Device(store.get(f"device/{rank}").decode()) for rank in range(place.size)]
    if len({device.kind for device in devices}) > 1:
        raise ConfigError(
            f"The machines have devices of two kinds, {', '.join(devices)}: their kernels round differently. Name "
            f"logical CPU devices on all of them: --devices cpu:0,cpu:1."
        )
    return devices


def _who_is_lost(lost: PeersLost, store: Store, devices: list[Device], place: Place) -> RunError:
    try:
        _, said = find_late(store, [str(rank) for rank in range(place.size)], list(devices), place.rank)
    except RuntimeError:
        said = "the meeting point of all processes cannot be reached, so other machines, or the way to them, are gone"
    what = "in an exchange, others did not arrive" if lost.is_late else "in an exchange, others were lost"
    return RunError(f"rank {place.rank} ({devices[place.rank]}), {what}: {said or lost}. Go on with --resume.")


def _is_said(store: Store) -> bool:
    """Whether another rank has said already what went wrong."""
    try:
        return store.add("failed", 1) > 1
    except RuntimeError:
        return False
