"""A run in processes that may come and go: when the others change, each of them goes on from the newest state."""

import tempfile
from dataclasses import replace
from typing import IO, Any

from lockstep.training.checkpoint import Checkpoint, how_to_go_on, unpacked
from lockstep.config import RunConfig
from lockstep.runtime import Engine
from lockstep.runtime.process_group import check_can_fork
from lockstep.runtime.launch.supervisor import Failed, Supervisor
from lockstep.runtime.launch.worker import Generation, Member
from lockstep.runtime.processes import Processes
from lockstep.training.loop import Start, Training
from lockstep.core.errors import Interrupted, PeersLost
from lockstep.core.serialization import pack, unpack
from lockstep.training.setup import Prepared
from lockstep.report.events import EpochDone, Incident, Result
from lockstep.report.runlog import RunLog
from lockstep.training.reporting import report
from lockstep.partition.balance import balance_for


def train_in_processes(config: RunConfig, prepared: Prepared, start: Start, log: RunLog | None, quiet: bool) -> Result:
    """Trains in a worker process for each device; gives the result of the one that is rank 0 at the end."""
    check_can_fork(prepared.devices)
    with prepared.backend.session([]):  # what the framework loads for one is loaded once, and not by every worker
        pass
    with tempfile.TemporaryFile() as answer:

        def work(member: Member) -> None:
            Worker(config, prepared, start, log, quiet, answer).work(member)

        drops_hung = config.on_hang == "drop"
        try:
            Supervisor(prepared.devices, work, config.timeout, drops_hung, config.max_restarts).supervise(quiet)
        except Interrupted as problem:
            raise Interrupted(f"{problem}{how_to_go_on(config)}") from None
        except Failed as problem:
            if problem.exit_status == Interrupted.exit_status:
                raise Interrupted(str(problem)) from None
            if log is not None and not problem.is_recorded:
                log.write(Incident("stopped", str(problem)))
            if problem.trace:
                problem.add_note(problem.trace)  # for a program: the command line shows it by itself
            if not problem.trace and "Go on with: " not in str(problem):
                problem.args = (f"{problem}{how_to_go_on(config)}",)
            raise
        answer.seek(0)
        return result_of(unpack(answer.read()), config, prepared)


class Worker:
    """One process's part of the run, over all generations that it lives in."""

    def __init__(
        self, config: RunConfig, prepared: Prepared, start: Start, log: RunLog | None, quiet: bool, answer: IO[bytes]
    ) -> None:
        self._config, self._prepared, self._start = config, prepared, start
        self._log, self._quiet, self._answer = log, quiet, answer
        self._kept = start.checkpoint  # the run after the last step that this process knows of

    def work(self, member: Member) -> None:
        """Takes part until the run is done."""
        number = 0
        while True:
            generation = member.join(number)
            number = generation.number + 1
            try:
                self._take_part(member, generation)
                if generation.workers[0] == member.worker:
                    return
                member.wait_for_the_next(generation)
            except PeersLost as lost:
                member.tell_lost(generation, lost)

    def _take_part(self, member: Member, generation: Generation) -> None:
        config, prepared, is_first = self._config, self._prepared, generation.number == 0
        rank = generation.workers.index(member.worker)
        member.whereabouts.phase = "start"
        group = member.connect(generation)
        with Processes(
            prepared.backend,
            generation.devices,
            group,
            config.exchange,
            balance_for(config.balance),
            member.whereabouts,
            config.bucket_mb,
        ) as engine:
            self._kept = agree(engine, self._kept)
            if rank == 0:
                member.tell_met(generation)
            step = member.whereabouts.step = self._kept.progress.step if self._kept else 0
            going_on = f"going on after step {step} on [{', '.join(generation.devices)}]"
            start = replace(
                self._start,
                checkpoint=self._kept,
                notes=self._start.notes if is_first else [*generation.notes, going_on],
                num_restarts=generation.number,
                checkpoints=self._start.checkpoints if rank == 0 else None,
                is_stopping=lambda: rank == 0 and member.is_to_stop(),
            )
            training = Training(config, prepared, engine, start)
            try:
                result = report(training.events(), self._log if rank == 0 else None, self._quiet or rank != 0)
            except PeersLost:
                self._kept = training.checkpoint()
                raise
            if rank != 0 and config.checkpoint_every != 0:  # in case it has to take over from one that dies
                self._kept = training.checkpoint()
        if rank == 0:
            self._answer.seek(0)
            self._answer.truncate()
            self._answer.write(pack(plain_of(result)))
            self._answer.flush()


def agree(engine: Engine, own: Checkpoint | None) -> Checkpoint | None:
    """The newest state that any rank has, on all ranks."""
    at = [-1, 0] if own is None else [own.progress.step, own.progress.epoch]  # a step may be done, and its epoch not
    places = engine.gather([at])
    newest = max(places)
    if newest[0] < 0 or min(places) == newest:
        return own
    data = engine.share(places.index(newest), lambda: own.packed() if own is not None else b"")
    return own if at == newest else unpacked(data)


def plain_of(result: Result) -> dict[str, Any]:
    """A result as plain values and arrays."""
    return {"summary": {**result.summary(), "run": None}, "params": result.params, "buffers": result.buffers}


def result_of(plain: dict[str, Any], config: RunConfig, prepared: Prepared) -> Result:
    """The result again, in this process."""
    summary, weights = plain["summary"], {**plain["params"], **plain["buffers"]}
    ordered = {name: weights[name] for name in prepared.task.initial}
    return Result(
        **{
            **summary,
            "run": config.out,
            "history": [EpochDone(**done) for done in summary["history"]],
            "params": {name: plain["params"][name] for name in prepared.task.parameters},
            "buffers": {name: ordered[name] for name in ordered if name in plain["buffers"]},
            "module": prepared.task.trained(ordered),
        }
    )
