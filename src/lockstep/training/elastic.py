"""A run in processes that may come and go: when the others change, each of them continues from the newest state."""

import tempfile
from dataclasses import replace
from typing import IO, Any, NamedTuple

from lockstep.config import RunConfig
from lockstep.core.errors import Interrupted, PeerFailure
from lockstep.core.serialization import pack, unpack
from lockstep.report.events import EpochDone, Incident, Result
from lockstep.report.runlog import RunLog
from lockstep.runtime.engine import Engine
from lockstep.runtime.launch.supervisor import Supervisor, WorkerFailed
from lockstep.runtime.launch.worker_client import Generation, WorkerClient
from lockstep.runtime.process_group import check_can_fork
from lockstep.runtime.processes import Processes
from lockstep.training.checkpoint import Checkpoint, how_to_resume, unpacked
from lockstep.training.loop import ResumePoint, Training
from lockstep.training.replica_set import merged
from lockstep.training.run import report
from lockstep.training.setup import Prepared


class WorkerRun(NamedTuple):
    """What every worker of a run is forked with."""

    config: RunConfig
    prepared: Prepared
    start: ResumePoint
    log: RunLog | None
    quiet: bool
    answer: IO[bytes]  # where rank 0 writes the result


def train_in_processes(
    config: RunConfig, prepared: Prepared, start: ResumePoint, log: RunLog | None, quiet: bool
) -> Result:
    """Trains in a worker process for each device; gives the result of the one that is rank 0 at the end."""
    check_can_fork(prepared.devices)
    with prepared.backend.session([]):  # what the framework loads for one is loaded once, and not by every worker
        pass
    with tempfile.TemporaryFile() as answer:
        run = WorkerRun(config, prepared, start, log, quiet, answer)

        def work(client: WorkerClient) -> None:
            Worker(run).work(client)

        drops_hung = config.on_hang == "drop"
        try:
            Supervisor(prepared.devices, work, config.timeout, drops_hung, config.max_restarts).supervise(quiet)
        except Interrupted as problem:
            raise Interrupted(f"{problem}{how_to_resume(config)}") from None
        except WorkerFailed as problem:
            if problem.exit_status == Interrupted.exit_status:
                raise Interrupted(str(problem)) from None
            if log is not None and not problem.is_recorded:
                log.write(Incident("stopped", str(problem)))
            if problem.trace:
                problem.add_note(problem.trace)  # for a program: the command line shows it by itself
            if not problem.trace and "Resume with: " not in str(problem):
                problem.args = (f"{problem}{how_to_resume(config)}",)
            raise
        answer.seek(0)
        return result_of(unpack(answer.read()), config, prepared)


class Worker:
    """One process's part of the run, over all generations that it lives in."""

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._kept = run.start.checkpoint  # the run after the last step that this process knows of

    def work(self, client: WorkerClient) -> None:
        """Takes part until the run is done."""
        number = 0
        while True:
            generation = client.join(number)
            number = generation.number + 1
            try:
                self._work_in(generation, client)
                if generation.workers[0] == client.worker:
                    return
                client.wait_for_next(generation)
            except PeerFailure as failure:
                client.report_failure(generation, failure)

    def _work_in(self, generation: Generation, client: WorkerClient) -> None:
        config, prepared, start, log, quiet, answer = self._run
        rank = generation.workers.index(client.worker)
        client.position.phase = "start"
        group = client.connect(generation)
        with Processes(prepared.backend, generation.devices, group, client.position) as engine:
            self._kept = agree(engine, self._kept)
            if rank == 0:
                client.report_connected(generation)
            step = client.position.step = self._kept.progress.step if self._kept else 0
            continuing = f"continuing after step {step} on [{', '.join(generation.devices)}]"
            start = replace(
                start,
                checkpoint=self._kept,
                notes=start.notes if generation.number == 0 else [*generation.notes, continuing],
                num_restarts=generation.number,
                checkpoints=start.checkpoints if rank == 0 else None,
                is_stopping=lambda: rank == 0 and client.is_to_stop(),
            )
            training = Training(config, prepared, engine, start)
            try:
                result = report(training.events(), log if rank == 0 else None, quiet or rank != 0)
            except PeerFailure:
                self._kept = training.local_checkpoint()
                raise
            if rank != 0 and config.checkpoint_every != 0:  # in case it has to take over from one that dies
                self._kept = training.local_checkpoint()
        if rank == 0:
            answer.seek(0)
            answer.truncate()
            answer.write(pack(plain_of(result)))
            answer.flush()


def agree(engine: Engine, own: Checkpoint | None) -> Checkpoint | None:
    """The newest state that the ranks have together, on all ranks; None where nobody has one.

    Where a rank holds a part of the model, the newest state is one of which all parts are there.
    """
    at, names = ([-1, 0], []) if own is None else (position_of(own), sorted([*own.weights, *own.states]))
    found = engine.all_gather([[at, names]])
    everything = {name for _, held in found for name in held}
    held_at = [(position, {n for other, held in found if other == position for n in held}) for position, _ in found]
    newest = max([position for position, held in held_at if held == everything], default=[-1, 0])
    if newest[0] < 0 or all(entry == [newest, names] for entry in found):
        return own
    parts: list[bytes] = []
    missing = set(everything)
    for rank, (position, held) in enumerate(found):
        if position == newest and missing.intersection(held):
            missing.difference_update(held)
            parts.append(engine.broadcast(rank, lambda: own.packed() if own is not None else b""))
    if own is not None and at == newest and everything == set(names):
        return own
    states = [unpacked(part) for part in parts]
    return replace(
        states[0], weights=merged([one.weights for one in states]), states=merged([one.states for one in states])
    )


def position_of(checkpoint: Checkpoint) -> list[int]:
    """How far a run is: a step may be done, and its epoch not."""
    return [checkpoint.progress.step, checkpoint.progress.epoch]


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
