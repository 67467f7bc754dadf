"""Measures contenders: all are started, then they take turns, trial by trial. Only one computes at a time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from lockstep.bench.contenders import CONTENDERS, ONE_DEVICE, OURS
from lockstep.bench.processes import ContenderFailed, ContenderProcesses
from lockstep.bench.tables import Row, Table
from lockstep.bench.workload import Workload
from lockstep.core.device import Device

Log = Callable[[str], None]  # shows a line of progress
EXCHANGE_SIZES = {500_000: 20, 25_000_000: 3, 100_000_000: 1}  # bytes -> exchanges of one trial
EXCHANGE_NAMES = ("all_reduce", "sharded", "gather", "tree", "ring")


class Measurement:
    """The rows of one table, and the processes that measure each of them; rows may share their processes."""

    def __init__(self, title: str, rows: dict[str, Row], processes: dict[str, ContenderProcesses], log: Log) -> None:
        self._title, self._rows, self._running, self._log = title, rows, processes, log

    def ask(self, name: str, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answer of each rank of a contender; none if it has failed, now or before."""
        if name not in self._running:
            return []
        processes = self._running[name]
        try:
            return processes.ask(command, **arguments)
        except ContenderFailed as failure:
            processes.close()
            self._log(f"{self._title}: {name} failed: {failure}")
            for other in [other for other, shared in self._running.items() if shared is processes]:
                self._rows[other].problem = f"failed: {failure}"
                del self._running[other]
            return []

    def run_trials(self, num_trials: int, num_warmup: int, num_steps: int, **arguments: dict[str, Any]) -> None:
        """Fills the rows. A contender gets its `arguments`, by its name, besides the number of steps."""
        self._log(f"{self._title}: starting {', '.join(self._running)}")
        first_rows = {processes: name for name, processes in reversed(self._running.items())}
        with ThreadPoolExecutor() as pool:  # all at the same time: nothing is measured yet
            list(pool.map(lambda name: self.ask(name, "prepare"), first_rows.values()))
        for name in list(self._running):
            self._log(f"{self._title}: warming up {name}")
            if answers := self.ask(name, "warm_up", num_steps=num_warmup, **arguments.get(name, {})):
                self._rows[name].chosen = answers[0]["chosen"]
        for trial in range(1, num_trials + 1):
            for name, row in self._rows.items():
                if answers := self.ask(name, "run", num_steps=num_steps, **arguments.get(name, {})):
                    done = answers[0].get("num_steps", num_steps)
                    row.seconds.append(answers[0]["seconds"] / done)  # rank 0 stops its clock after a barrier
                    row.peak_bytes = max(answer.get("peak_bytes", 0) for answer in answers)
                    if "loss" in answers[0]:
                        row.losses.append(sum(answer["loss"] for answer in answers) / len(answers))
            times = ", ".join(f"{name} {1000 * self._rows[name].seconds[-1]:.4g}" for name in self._running)
            self._log(f"{self._title}: trial {trial} of {num_trials}, ms: {times}")


def measure_model(workload: Workload, notes: list[str], names: list[str], num_trials: int, log: Log) -> Table:
    """The table of one model: a row for each of the contenders `names`, with its times, or with its problem."""
    from lockstep.runtime.store import serve_store  # imports torch

    rows = {name: Row(name, CONTENDERS[name].about, problem=CONTENDERS[name].problem(workload)) for name in names}
    ranks = [Device(name) for name in dict.fromkeys(workload.devices)]
    if len(ranks) < len(workload.devices):
        notes = [*notes, f"the others have {len(ranks)} rank{'s' * (len(ranks) > 1)}: NCCL refuses two on one GPU"]
    with ExitStack() as closing:
        _store, port, _ = serve_store()  # it serves as long as something refers to it
        running = {}
        for name in [name for name, row in rows.items() if not row.problem]:
            devices, rendezvous = (ranks, port) if CONTENDERS[name].is_parallel else (ranks[:1], None)
            running[name] = closing.enter_context(ContenderProcesses(name, workload, devices, rendezvous))
        measurement = Measurement(workload.model, rows, running, log)
        measurement.run_trials(num_trials, workload.num_warmup, workload.num_steps)
        for name in [name for name in rows if CONTENDERS[name].is_own]:
            for answer in measurement.ask(name, "finish"):
                rows[name].weights_sha256 = answer["weights_sha256"]
    title = f"{workload.model} on [{', '.join(workload.devices)}], batch {workload.batch_size}, {workload.precision}"
    settings = {**workload.to_dict(), "trials": num_trials}
    return Table(title, OURS, list(rows.values()), notes=notes + _same_weights(rows), settings=settings)


def measure_exchanges(
    devices: list[Device], num_trials: int, log: Log, sizes: dict[int, int] | None = None
) -> list[Table]:
    """A table for each size of vector: our exchanges against all_reduce, between processes of this machine."""
    from lockstep.runtime.store import serve_store  # imports torch

    ranks = list(dict.fromkeys(devices))
    if len(ranks) < 2 or devices[0].kind == "cpu":
        ranks = [Device("cpu:0"), Device("cpu:1")]
    transport = "NCCL" if ranks[0].kind == "cuda" else "Gloo on loopback"
    workload = Workload(
        model="exchanges", devices=tuple(ranks), batch_size=1, num_steps=1, num_warmup=1, learning_rate=1.0
    )
    tables, problem = [], ""
    _store, port, _ = serve_store()
    with ContenderProcesses("exchanges", workload, ranks, port) as processes:
        for num_bytes, num_steps in (sizes or EXCHANGE_SIZES).items():
            rows = {name: Row(name, problem=problem) for name in EXCHANGE_NAMES}
            title = f"{num_bytes / 1e6:g} MB between {len(ranks)} processes ({transport})"
            running = {} if problem else dict.fromkeys(EXCHANGE_NAMES, processes)
            arguments = {name: {"exchange": name, "num_bytes": num_bytes} for name in rows}
            Measurement(title, rows, running, log).run_trials(num_trials, 1, num_steps, **arguments)
            problem = rows["all_reduce"].problem  # they share their processes, and fail together
            settings = {"num_bytes": num_bytes, "ranks": ranks, "exchanges_per_trial": num_steps, "trials": num_trials}
            tables.append(Table(title, "all_reduce", list(rows.values()), "exchange", settings=settings))
    return tables


def _same_weights(rows: dict[str, Row]) -> list[str]:
    """A note on whether one device and several end with the same weights."""
    ours, one = rows.get(OURS), rows.get(ONE_DEVICE)
    if not ours or not one or ours.problem or one.problem:
        return []
    if ours.weights_sha256 == one.weights_sha256:
        return [f"{OURS} and {ONE_DEVICE} end with the same weights, bit for bit"]
    return [f"{OURS} and {ONE_DEVICE} end with different weights, which must not happen: please report it"]
