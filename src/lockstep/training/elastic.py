"""A run in worker processes that may die and be replaced: those that are left continue from the newest state."""

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from lockstep.config import RunConfig
from lockstep.core.errors import Interrupted, PeerFailure, RunError
from lockstep.core.files import what_to_do
from lockstep.core.serialization import CorruptData, pack, unpack
from lockstep.replicas.replica import ReplicaState
from lockstep.report.events import EpochDone, Incident, Result
from lockstep.report.notebook import in_notebook, shown_here
from lockstep.report.sinks import Sink, Sinks
from lockstep.runtime.engine import Engine
from lockstep.runtime.launch.supervisor import Supervisor, WorkerFailed
from lockstep.runtime.launch.worker_client import Generation, WorkerClient
from lockstep.runtime.processes import Processes, check_can_fork
from lockstep.training.checkpoint import Checkpoint, how_to_resume, identity_of, max_bytes_of, unpacked
from lockstep.training.loop import Training
from lockstep.training.replica_set import merged, merged_state
from lockstep.training.resume_point import ResumePoint
from lockstep.training.run import report
from lockstep.training.setup import Prepared
from lockstep.training.task import Task


def train_in_processes(
    config: RunConfig, prepared: Prepared, start: ResumePoint, log: Sink | None, quiet: bool
) -> Result:
    """The result of a run with a worker process for each device, from the worker that is rank 0 at the end."""
    check_can_fork(prepared.backend, prepared.devices)
    with prepared.backend.session([]):  # loads what a session needs once, and not in every worker
        pass
    with file_in_memory() as answer, ExitStack() as undo:
        if in_notebook() and not quiet:  # what another process prints does not reach the cell
            log, quiet = Sinks([*([] if log is None else [log]), undo.enter_context(shown_here())]), True
        worker, drops_hung = Worker(config, prepared, start, log, quiet, answer), config.on_hang == "drop"
        try:
            Supervisor(prepared.devices, worker.work, config.timeout, drops_hung, config.max_restarts).supervise(quiet)
        except Interrupted as problem:
            raise Interrupted(f"{problem}{how_to_resume(config)}") from None
        except WorkerFailed as problem:
            if problem.exit_status == Interrupted.exit_status:
                answer.seek(0)
                error, packed = Interrupted(str(problem)), answer.read()
                error.result = unpacked_result(packed, config, prepared.task) if packed else None
                raise error from None
            if log is not None and not problem.is_recorded:
                log.write(Incident("stopped", str(problem)))
            if problem.trace:
                problem.add_note(problem.trace)  # for a program: the command line prints it itself
            if not problem.trace and "Resume with: " not in str(problem):
                problem.args = (f"{problem}{how_to_resume(config)}",)
            raise
        answer.seek(0)
        return unpacked_result(answer.read(), config, prepared.task)


def file_in_memory() -> IO[bytes]:
    """A file without a disk that could be full when a run is done."""
    return open(os.memfd_create("lockstep"), "wb+") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


@dataclass
class Worker:
    """One worker process, over all generations that it is part of; it is forked from the supervisor."""

    config: RunConfig
    prepared: Prepared
    start: ResumePoint  # with the newest state that this process has
    log: Sink | None
    quiet: bool
    answer: IO[bytes]  # rank 0 writes the result into it

    def work(self, client: WorkerClient) -> None:
        """Runs a rank of each generation until the run is done."""
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
        rank = generation.workers.index(client.worker)
        client.position.phase, client.position.is_mid_update = "start", False
        group = client.connect(generation)
        with Processes(self.prepared.backend, generation.devices, group, client.position) as engine:
            checkpoint = agree(engine, self.start, identity_of(self.config, self.prepared.task), self.prepared.task)
            self.start = replace(self.start, checkpoint=checkpoint)
            if rank == 0:
                client.report_connected(generation)
            step = client.position.step = checkpoint.progress.step if checkpoint else 0
            continuing = f"continuing after step {step} on [{', '.join(generation.devices)}]"
            start = replace(
                self.start,
                notes=self.start.notes if generation.number == 0 else [*generation.notes, continuing],
                num_restarts=generation.number,
                checkpoints=self.start.checkpoints if rank == 0 else None,
                is_stopping=lambda: rank == 0 and client.is_to_stop(),
            )
            training = Training(self.config, self.prepared, engine, start)
            try:
                result = report(training.events(), self.log if rank == 0 else None, self.quiet or rank != 0)
            except PeerFailure:
                if not client.position.is_mid_update:  # else it is of no step: what all have agreed on before is
                    self.start = replace(self.start, checkpoint=training.local_checkpoint())
                raise
            except Interrupted as stopped:
                if rank == 0 and stopped.result is not None:
                    self._answer(stopped.result)
                raise
            if rank != 0 and self.config.checkpoint_every != 0:  # in case it has to replace rank 0
                self.start = replace(self.start, checkpoint=training.local_checkpoint())
        if rank == 0:
            self._answer(result)

    def _answer(self, result: Result) -> None:
        self.answer.seek(0)
        self.answer.truncate()
        self.answer.write(packed_result(result))
        self.answer.flush()


def agree(engine: Engine, start: ResumePoint, identity: dict[str, Any], task: Task) -> Checkpoint | None:
    """The newest state of which all parts of the model are there, on all ranks; None where there is none.

    A part that was lost with its rank is in the newest checkpoint file. What other ranks offer must be of this run.
    """
    own = start.checkpoint
    at, names = [-1, 0], list[str]()  # the step may be done and its epoch not, so both count
    if own is not None:
        at, names = [own.progress.step, own.progress.epoch], sorted([*own.weights, *own.states["units"]])
    found = engine.all_gather([[at, names]])
    needed = {*task.initial, *task.state_units}
    held_at = [(position, {n for other, held in found if other == position for n in held}) for position, _ in found]
    newest = max([position for position, held in held_at if held >= needed], default=[-1, 0])
    if newest < max(position for position, _ in found):
        saved = _from_file(engine, start, identity, task)
        if saved is not None and [saved.progress.step, saved.progress.epoch] > newest:
            return saved
    if newest[0] < 0:
        return None
    if all(entry == [newest, names] for entry in found):
        return own
    everything = next(held for position, held in held_at if position == newest and held >= needed)
    parts, missing = [], set(everything)
    for rank, (position, held) in enumerate(found):
        if position == newest and missing.intersection(held):
            missing.difference_update(held)
            parts.append(engine.broadcast(rank, lambda: own.packed() if own is not None else b""))
    if own is not None and at == newest and everything == set(names):
        return own
    found_parts = [_of_this_run(part, identity) for part in parts]
    weights = merged([part.weights for part in found_parts])
    state = merged_state([ReplicaState(**part.states) for part in found_parts])
    in_order = {name: weights[name] for name in task.initial}
    return replace(found_parts[0], weights=in_order, states=state._asdict())


def _from_file(engine: Engine, start: ResumePoint, identity: dict[str, Any], task: Task) -> Checkpoint | None:
    """The newest checkpoint in the run's folder, which rank 0 reads; None: the run starts again."""

    def read() -> bytes:
        if start.checkpoints is None:
            return b""
        try:
            newest = start.checkpoints.newest(lambda note: None, max_bytes_of(task.initial))
        except OSError as problem:
            what = f"{start.checkpoints.folder} cannot be read: {problem.strerror}"
            raise RunError(f"{what}. {what_to_do(problem)}, and use --resume.") from problem
        return newest[1].packed() if newest else b""

    packed = engine.broadcast(0, read)
    return _of_this_run(packed, identity) if packed else None


def _of_this_run(packed: bytes, identity: dict[str, Any]) -> Checkpoint:
    try:
        found = unpacked(packed)
    except CorruptData as problem:
        raise RunError(f"What another rank offers to continue from is damaged: {problem}.") from problem
    if found.run != identity:
        raise RunError("What another rank offers to continue from is of another run, or of other settings.")
    return found


def packed_result(result: Result) -> bytes:
    """The result as bytes, for another process."""
    weights = {**result.params, **result.buffers}
    plain = {"summary": {**result.summary(), "run": None}, "weights": weights, "ema": result.ema}
    trace = np.frombuffer(json.dumps(result.trace).encode(), np.uint8)  # it may be too long for plain values
    return pack({**plain, "trace": trace})


def unpacked_result(packed: bytes, config: RunConfig, task: Task) -> Result:
    """The result that was packed."""
    plain = unpack(packed)
    summary, weights = plain["summary"], {name: plain["weights"][name] for name in task.whole(task.initial)}
    params = {name: weights[name] for name in task.parameters}
    return Result(
        **{**summary, "run": config.out, "history": [EpochDone(**done) for done in summary["history"]]},
        params=params,
        buffers={name: array for name, array in weights.items() if name not in params},
        module=task.trained(weights),
        ema=plain["ema"],
        trace=json.loads(plain["trace"].tobytes()),
    )
