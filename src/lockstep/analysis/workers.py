"""Worker processes as a run has them, for what is measured in them: forked, connected over Gloo or NCCL, then ended."""

from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import IO, Any, NamedTuple

from lockstep.analysis.real_run import RealRun
from lockstep.config import RunConfig
from lockstep.core.errors import Interrupted, PeerFailure
from lockstep.core.serialization import pack, unpack
from lockstep.runtime.launch.supervisor import Supervisor, WorkerFailed
from lockstep.runtime.launch.worker_client import Generation, WorkerClient
from lockstep.runtime.process_transport import ProcessTransport
from lockstep.runtime.processes import Processes, check_can_fork
from lockstep.training.elastic import file_in_memory
from lockstep.training.setup import Prepared

LOADING_STEPS, COUNTED_STEPS = 1, 3  # of a turn, each after one that does not count


class Member(NamedTuple):
    """What a worker process works with."""

    engine: Processes
    transport: Callable[[], ProcessTransport]  # a new one, as every schedule has
    check: Callable[[], None]  # between steps: raises where the user has interrupted the program


def in_workers(config: RunConfig, prepared: Prepared, work: Callable[[Member], Any]) -> Any:
    """What `work` gives on rank 0, in plain values: every device has a process, and all of them do it."""
    check_can_fork(prepared.backend, prepared.devices)
    with prepared.backend.session([]):  # loads what a session needs once, and not in every worker
        pass
    with file_in_memory() as answer:

        def run(client: WorkerClient) -> None:
            generation = client.join(0)
            try:
                _work_in(generation, client, prepared, work, answer)
            except PeerFailure as failure:
                client.report_failure(generation, failure)
            if generation.workers[0] != client.worker or not answer.tell():
                client.wait_for_next(generation)  # the supervisor ends it, when rank 0 is done or another one failed

        try:
            Supervisor(prepared.devices, run, config.timeout, drops_hung=False, max_restarts=0).supervise(quiet=True)
        except WorkerFailed as problem:
            if problem.exit_status == Interrupted.exit_status:
                raise Interrupted("interrupted.") from None
            raise
        answer.seek(0)
        return unpack(answer.read())


class ProcessRun:
    """A run in worker processes, which are started anew for each of its turns."""

    def __init__(self, config: RunConfig, prepared: Prepared) -> None:
        self._config, self._prepared = config, prepared

    def seconds_in_turn(self) -> float:
        """The time of a step, after some that load things."""
        return float(in_workers(self._config, self._prepared, self._steps))

    def _steps(self, member: Member) -> float:
        engine, times = member.engine, list[float]()
        with closing(self._prepared.task.train_set(engine)) as source:
            run = RealRun(self._config, self._prepared, engine, source)
            for _ in range(LOADING_STEPS + COUNTED_STEPS):
                member.check()
                engine.all_gather([None])
                times.append(run.seconds_in_turn())
        return median(times[LOADING_STEPS:])


def _work_in(
    generation: Generation, client: WorkerClient, prepared: Prepared, work: Callable[[Member], Any], answer: IO[bytes]
) -> None:
    def check() -> None:
        if client.is_to_stop():
            raise Interrupted("interrupted.")

    group = client.connect(generation)
    with Processes(prepared.backend, generation.devices, group, client.position) as engine:
        found = work(Member(engine, lambda: ProcessTransport(group, client.position), check))
    if generation.workers[0] == client.worker:
        answer.write(pack(found))
        answer.flush()
