"""The measuring: all contenders are started, then each has its turn, round after round. One computes at a time."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lockstep.bench.contenders import CONTENDERS, ONE_DEVICE, OURS
from lockstep.bench.processes import ContenderFailed, Running
from lockstep.bench.tables import Row, Table
from lockstep.bench.work import Work
from lockstep.core.device import Device

Say = Callable[[str], None]  # shows a line of progress
SIZES = {500_000: 20, 25_000_000: 3, 100_000_000: 1}  # bytes -> exchanges of one trial
EXCHANGE_NAMES = ("all_reduce", "sharded", "gather", "tree", "ring")


def measure_model(work: Work, notes: list[str], names: list[str], num_trials: int, say: Say) -> Table:
    """The table of one model: a row for each of the contenders `names`, measured, or with its problem."""
    from lockstep.runtime.store import LOOPBACK, interface_of, serve_store  # loads its framework

    rows = {name: Row(name, CONTENDERS[name].about, problem=CONTENDERS[name].problem()) for name in names}
    running: dict[str, Running] = {}
    ranks = [Device(name) for name in dict.fromkeys(work.devices)]  # a GPU that is listed twice has one rank
    with ExitStack() as closing:
        _store, port, _ = serve_store()  # it ends when nothing refers to it any more
        for name in [name for name, row in rows.items() if not row.problem]:
            is_parallel = CONTENDERS[name].is_parallel
            running[name] = Running(
                name, work, ranks if is_parallel else ranks[:1], port if is_parallel else 0, interface_of(LOOPBACK)
            )
            closing.callback(running[name].kill)

        def turn(name: str, ask: Callable[[Running], list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
            if name not in running:
                return None
            try:
                return ask(running[name])
            except ContenderFailed as failed:
                rows[name].problem = f"failed: {failed}"
                running.pop(name).kill()
                say(f"{work.model}: {name} {rows[name].problem}")
                return None

        say(f"{work.model}: starting {', '.join(running)}")
        for name in list(running):
            turn(name, Running.answers)
        for name in list(running):
            say(f"{work.model}: warming up {name}")
            if found := turn(name, lambda one: one.ask("warm_up", num_steps=work.num_warmup)):
                rows[name].chosen = found[0]["chosen"]
        for trial in range(1, num_trials + 1):
            for name in list(running):
                if found := turn(name, lambda one: one.ask("run", num_steps=work.num_steps)):
                    _note(rows[name], found, work.num_steps)
            times = ", ".join(f"{name} {1000 * rows[name].seconds[-1]:.4g}" for name in running)
            say(f"{work.model}: trial {trial} of {num_trials}, ms/step: {times}")
        for name in [name for name in running if CONTENDERS[name].is_own]:
            if found := turn(name, lambda one: one.ask("finish")):
                rows[name].weights_sha256 = found[0]["weights_sha256"]
        for one in running.values():
            one.close()
    notes = notes + _said_of_ranks(work, ranks) + _same_weights(rows)
    return Table(_title(work), OURS, list(rows.values()), notes=notes, settings=_settings(work, num_trials))


def measure_exchanges(
    devices: list[Device], num_trials: int, say: Say, sizes: dict[int, int] | None = None
) -> list[Table]:
    """A table for each size of vector: our exchanges against all_reduce, between processes of this machine."""
    from lockstep.runtime.store import LOOPBACK, interface_of, serve_store  # loads its framework

    sizes, ranks = sizes or SIZES, list(dict.fromkeys(devices))
    if len(ranks) < 2 or devices[0].kind == "cpu":
        ranks = [Device("cpu:0"), Device("cpu:1")]
    work = Work(
        model="exchanges",
        devices=tuple(map(str, ranks)),
        batch_size=1,
        num_steps=1,
        num_warmup=1,
        learning_rate=1.0,
        num_shards=len(ranks),
    )
    wire = "NCCL" if ranks[0].kind == "cuda" else "Gloo on loopback"
    tables = []
    with ExitStack() as closing:
        _store, port, _ = serve_store()
        running = Running("exchanges", work, ranks, port, interface_of(LOOPBACK))
        closing.callback(running.kill)
        say("exchanges: starting")
        problem = _answer_or_problem(running.answers)
        for num_bytes, num_steps in sizes.items():
            rows = {name: Row(name, problem=problem) for name in EXCHANGE_NAMES}
            title = f"{num_bytes / 1e6:g} MB between {len(ranks)} processes ({wire})"
            tables.append(Table(title, "all_reduce", list(rows.values()), "exchange"))
            tables[-1].settings = {
                "num_bytes": num_bytes, "ranks": ranks, "exchanges_per_trial": num_steps, "trials": num_trials
            }  # fmt: skip
            for trial in range(num_trials + 1):
                for name, row in rows.items():
                    if row.problem:
                        continue
                    try:
                        if trial == 0:
                            running.ask("warm_up", method=name, num_bytes=num_bytes)
                        else:
                            found = running.ask("run", method=name, num_bytes=num_bytes, num_steps=num_steps)
                            _note(row, found, num_steps)
                    except ContenderFailed as failed:  # with it, all exchanges have ended
                        problem = f"failed: {failed}"
                        for other in rows.values():
                            other.problem = problem
                if trial and not problem:
                    times = ", ".join(f"{name} {1000 * row.seconds[-1]:.4g}" for name, row in rows.items())
                    say(f"{title}: trial {trial} of {num_trials}, ms: {times}")
        running.close()
    return tables


def _answer_or_problem(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except ContenderFailed as failed:
        return f"failed: {failed}"
    return ""


def _note(row: Row, answers: list[dict[str, Any]], num_steps: int) -> None:
    """Takes note of a trial: the first rank's time, which ends when all have come, and the loss over all ranks."""
    row.seconds.append(answers[0]["seconds"] / num_steps)
    if "loss" in answers[0]:
        row.losses.append(sum(answer["loss"] for answer in answers) / len(answers))


def _same_weights(rows: dict[str, Row]) -> list[str]:
    """The first promise, looked at once more."""
    ours, one = rows.get(OURS), rows.get(ONE_DEVICE)
    if not ours or not one or ours.problem or one.problem:
        return []
    if ours.weights_sha256 == one.weights_sha256:
        return [f"{OURS} and {ONE_DEVICE} end with the same weights, bit for bit"]
    return [f"{OURS} and {ONE_DEVICE} end with different weights, which must not happen: please report it"]


def _said_of_ranks(work: Work, ranks: list[Device]) -> list[str]:
    if len(ranks) == len(work.devices):
        return []
    return [f"the others have {len(ranks)} rank{'s' * (len(ranks) > 1)}: NCCL refuses two on one GPU"]


def _title(work: Work) -> str:
    return f"{work.model} on [{', '.join(work.devices)}], batch {work.batch_size}, {work.precision}"


def _settings(work: Work, num_trials: int) -> dict[str, Any]:
    return {
        "model": work.model,
        "data": work.data,
        "devices": list(work.devices),
        "batch_size": work.batch_size,
        "learning_rate": work.learning_rate,
        "precision": work.precision,
        "num_shards": work.num_shards,
        "seed": work.seed,
        "more": work.settings,
        "steps_per_trial": work.num_steps,
        "trials": num_trials,
    }
