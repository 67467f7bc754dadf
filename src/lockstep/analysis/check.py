"""A plan against what is measured: the configurations that this machine can run, step by step, in turn."""

from contextlib import ExitStack, suppress
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple, Protocol

from lockstep.analysis.command import chosen_settings
from lockstep.analysis.cost import Log
from lockstep.analysis.plan import Plan, PlanRow
from lockstep.analysis.real_run import SharedEngines
from lockstep.analysis.timing import interruptible_clock
from lockstep.analysis.unmeasurable import cannot_be_measured
from lockstep.backends import devices_for, load_backend
from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError, OutOfMemory
from lockstep.training.setup import prepare, with_engine
from lockstep.training.task import UserObjects

MIN_ROUNDS, MAX_ROUNDS = 3, 25
CHECK_TIMES = 3  # as long as a plan measures, a check takes, about
ORDER_MATTERS = 0.10  # configurations that differ by more than this have to be predicted in the right order


class Run(Protocol):
    """A configuration that is run."""

    def seconds_in_turn(self) -> float:
        """The time of a step after others of this run."""
        ...


class CheckSummary(NamedTuple):
    """How good the predictions were."""

    median_error: float
    largest_error: float
    wrong_pairs: int  # in the wrong order, of those that differ by more than a tenth
    num_pairs: int

    def sentence(self) -> str:
        """For the terminal."""
        return (
            f"error of the prediction: median {100 * self.median_error:.1f} %, largest "
            f"{100 * self.largest_error:.1f} %; {self.wrong_pairs} of {self.num_pairs} pairs that differ by "
            f"more than 10 % are in the wrong order"
        )


def checked(plan: Plan, config: RunConfig, objects: UserObjects | None, log: Log, seconds: float) -> Plan:
    """The plan with measured times beside the predicted ones: medians of steps that took turns."""
    backend = load_backend(config.backend)
    devices = devices_for(backend, config.devices)
    rows = [row for row in plan.rows if row.configuration.num_devices <= len(devices)]
    if plan.profile.engine == "processes" and devices[0].kind == "cuda" and backend.why_not_fork():
        log("not run: processes, which cannot be started from one that has measured a GPU")
        rows = [row for row in rows if row.configuration.num_devices == 1 and config.engine != "processes"]
    if not rows:
        raise ConfigError("--check runs what this machine can run, and no configuration is for its devices.")
    with ExitStack() as runs:
        engines, opened = SharedEngines(runs, backend, devices), dict[int, Run]()
        for number, row in enumerate(rows):
            log(f"preparing {row.command}")
            own = replace(config, **{"split": "data", **settings_of(config, row)})
            with cannot_be_measured(), suppress(OutOfMemory):  # what does not fit has no measured time
                opened[number] = _opened(own, objects, engines)
        times = _in_turn(opened, log, seconds)
    measured = {rows[number].configuration: 1e3 * median(found) for number, found in times.items()}
    return replace(plan, rows=tuple(_with(row, measured) for row in plan.rows),
                   recommended=_with(plan.recommended, measured))  # fmt: skip


def settings_of(config: RunConfig, row: PlanRow) -> dict[str, Any]:
    """The settings of a run on this machine."""
    at_hand = chosen_settings(config, row.configuration)
    return {**at_hand, "verify_every": 0, "check_every": 0, "out": None, "trace": False}


def _opened(config: RunConfig, objects: UserObjects | None, engines: SharedEngines) -> Run:
    """A run in this process, with what it needs loaded; or one in processes."""
    own = with_engine(config)
    if own.engine == "processes":
        from lockstep.analysis.workers import ProcessRun  # loads its framework

        return ProcessRun(own, prepare(own, objects))
    run = engines.run(own, prepare(own, objects))
    run.seconds_per_step()
    return run


def _in_turn(runs: dict[int, Run], log: Log, seconds: float) -> dict[int, list[float]]:
    """Steps of each, then others of each: what disturbs the machine disturbs all of them."""
    times = {number: list[float]() for number in runs}
    with interruptible_clock() as clock, cannot_be_measured():
        until = clock() + seconds
        for rounds in range(MAX_ROUNDS):
            if rounds >= MIN_ROUNDS and clock() > until:
                break
            log(f"round {rounds + 1}: a few steps of each of {len(runs)} configurations")
            for number, run in runs.items():
                clock()
                times[number].append(run.seconds_in_turn())
    return times


def _with(row: PlanRow, measured: dict[Any, float]) -> PlanRow:
    found = measured.get(row.configuration)
    return row if found is None else row._replace(measured_ms=found, error=row.predicted_ms / found - 1)


def summary_of(plan: Plan) -> CheckSummary:
    """How good the predictions of a checked plan were."""
    rows = [(row.predicted_ms, row.measured_ms, abs(row.error or 0.0)) for row in plan.rows if row.measured_ms]
    pairs = [(a, b) for number, a in enumerate(rows) for b in rows[:number]]
    apart = [(a, b) for a, b in pairs if abs(a[1] - b[1]) > ORDER_MATTERS * min(a[1], b[1])]
    wrong = sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in apart)
    errors = [error for _, _, error in rows]
    return CheckSummary(median(errors), max(errors), wrong, len(apart))
