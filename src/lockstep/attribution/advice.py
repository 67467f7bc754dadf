"""What to change first about a run, and what that would bring."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lockstep.attribution.what_if import WhatIf

WORTH = 0.05  # of a step: less is not worth a change
GAIN = 0.03  # of a step that a change must bring: less is within what steps differ by
OF_SHARED_CORES = ("exposed exchange", "waiting for the slower rank", "shared hardware")  # what too few cores look like


class Case(NamedTuple):
    """What an advice is about."""

    step_ms: float
    parts: dict[str, float]  # milliseconds
    settings: dict[str, Any]  # of the run, by the names of options
    num_devices: int
    num_shards: int
    what_if: WhatIf | None = None
    straggler: str = ""  # who it is, if there is one
    num_here: int = 0  # devices on the machine that this is said on; 0: not known
    num_cores: int = 0  # that it has

    @property
    def on_cpu(self) -> bool:
        """Whether all devices are cores of one machine."""
        is_cpu = str(self.settings.get("devices", "")).startswith("cpu")
        return is_cpu and self.num_here == self.num_devices

    @property
    def shares_cores(self) -> bool:
        """Whether there are more devices than cores."""
        return self.on_cpu and 0 < self.num_cores < self.num_here

    def is_worth(self, ms: float) -> bool:
        """Whether a step of so many milliseconds is worth a change."""
        return ms < (1 - GAIN) * self.step_ms

    def instead(self, ms: float) -> str:
        """What a change would bring."""
        return f"{ms:.2f} instead of {self.step_ms:.2f} ms"


def advice_for(case: Case) -> str:
    """One sentence: what to change first, and what it would bring by the planner's clock."""
    name = max(case.parts, key=lambda part: case.parts[part])
    if case.parts[name] < WORTH * case.step_ms:
        return f"Nothing to change: no part takes more than {100 * WORTH:.0f} % of a step."
    said = _too_few_cores(case) if case.shares_cores and name in OF_SHARED_CORES else ADVICE[name](case)
    return f"{name[0].upper()}{name[1:]}: {case.parts[name]:.2f} of {case.step_ms:.2f} ms. {said}."


def _too_few_cores(case: Case) -> str:
    cores = f"{case.num_cores} core{'s' * (case.num_cores > 1)}"
    why = f"{case.num_devices} devices share {cores} of one machine: they take turns, and more than {case.num_cores}"
    return f"{why} bring no speed. Use as many devices as cores (--devices {case.num_cores}): the same bits"


def _without(case: Case, part: str) -> str:
    return case.instead(case.step_ms - case.parts[part])


def _loading(case: Case) -> str:
    workers = case.settings.get("workers")
    more = f"--workers {2 * workers}" if isinstance(workers, int) and workers else "--workers 4"
    how = f"more loader workers ({more}), less work in __getitem__, or samples in memory as arrays"
    return f"Load samples faster, with {how}: at best {_without(case, 'loading')}"


def _host(case: Case) -> str:
    on_gpu = str(case.settings.get("devices", "")).startswith("cuda")
    captures = "Capture steps as CUDA graphs (--capture), or give" if on_gpu else "Give"
    return (
        f"{captures} the devices more work in a step, with a larger batch: at best {_without(case, 'launch and host')}"
    )


def _other_shards(case: Case, is_better: Callable[[int], bool]) -> tuple[int, float] | None:
    """The number of shards that would be best, and the milliseconds of a step; None: there is no better one."""
    if case.what_if is None:
        return None
    numbers = [number for number in case.what_if.numbers() if is_better(number)]
    found = [(case.what_if.step_ms(case.step_ms, number), -number) for number in numbers]
    ms, number = min(found, default=(case.step_ms, 0))
    return (-number, ms) if case.is_worth(ms) else None


def _smaller_shards(case: Case) -> str:
    best = _other_shards(case, lambda number: number < case.num_shards)
    if best is None:
        return f"Use a larger batch, so that shards are larger: at best {_without(case, 'smaller shards')}"
    number, ms = best
    return f"{_shards(number)} instead of {case.num_shards} (--shards {number}): {case.instead(ms)}; other bits"


def _exchange(case: Case) -> str:
    link = "" if case.on_cpu else ", or use a faster link between the devices"
    return f"Exchange less often, with a larger batch{link}: at best {_without(case, 'exposed exchange')}"


def _slower_rank(case: Case) -> str:
    who = case.straggler[:1].upper() + case.straggler[1:] if case.straggler else "Shares or devices are uneven"
    if case.what_if is not None and case.settings.get("balance") == "equal" and case.what_if.num_copies > 1:
        ms = case.what_if.balanced_ms(case.step_ms)
        if case.is_worth(ms):
            return f"{who}. Give faster devices more shards (--balance measured): {case.instead(ms)}; the same bits"
    at_best = _without(case, "waiting for the slower rank")
    return f"{who}. Find what holds it up, or use more, smaller shards to share out: at best {at_best}"


def _bubble(case: Case) -> str:
    best = _other_shards(case, lambda number: number > case.num_shards)
    if best is None:
        return f"Use fewer stages, or split the batch instead (--split data): at best {_without(case, 'bubble')}"
    number, ms = best
    return f"{_shards(number)} instead of {case.num_shards} (--shards {number}): {case.instead(ms)}; other bits"


def _shared(case: Case) -> str:
    why = f"The {case.num_devices} devices slow each other down: they share cores, caches or one GPU"
    return f"{why}. Use no more devices than there is hardware: at best {_without(case, 'shared hardware')}"


def _update(case: Case) -> str:
    at_best = _without(case, "update")
    return f"Every device updates all parameters: share that out (--update sharded): {at_best} at best; the same bits"


def _evaluation(case: Case) -> str:
    return f"Evaluate fewer test samples, or less often, in longer epochs: at best {_without(case, 'evaluation')}"


def _shards(number: int) -> str:
    return f"{number} shard{'s' * (number != 1)}"


ADVICE: dict[str, Callable[[Case], str]] = {
    "loading": _loading,
    "launch and host": _host,
    "smaller shards": _smaller_shards,
    "exposed exchange": _exchange,
    "waiting for the slower rank": _slower_rank,
    "bubble": _bubble,
    "shared hardware": _shared,
    "update": _update,
    "evaluation": _evaluation,
}
