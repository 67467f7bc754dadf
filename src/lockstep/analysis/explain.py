"""The explanation of a run that is over: from its folder, or its result."""

import math
from pathlib import Path
from typing import Any

from lockstep.attribution.waterfall import PARTS, Explanation
from lockstep.core.errors import ConfigError
from lockstep.report.events import Result
from lockstep.report.run_files import read_recorded


def explain(run: str | Path | Result) -> Explanation:
    """Where the time of a step went, of a run that was traced: its folder, or its result. Nothing is measured now.

    `print` shows it as a waterfall in milliseconds, from a perfect speed-up to what was measured.

    >>> from lockstep import train
    >>> result = train(2, num_epochs=1, data="fashion-mnist-mini", trace=True, quiet=True)
    >>> found = explain(result)
    >>> abs(found.perfect_ms + sum(found.parts.values()) + found.rest_ms - found.step_ms) < 0.01
    True
    """
    if isinstance(run, Result):
        name, found = "The run", run.explanation
    else:
        recorded = read_recorded(Path(run))
        name, found = str(run), recorded.explanation
        if recorded.traced and not found:
            raise ConfigError(f"{run} was traced, but ended early, and cannot be explained: {recorded.traced}.")
    if not found:
        raise ConfigError(f"{name} was not traced. Train again with --trace (trace=True).")
    return _checked(found, name)


def _checked(plain: dict[str, Any], name: str) -> Explanation:
    """From a file that anybody can have written to."""
    try:
        explanation = Explanation.from_plain(plain)
        parts = {part: float(explanation.parts[part]) for part in PARTS}
        numbers = [explanation.step_ms, explanation.perfect_ms, explanation.rest_ms, *parts.values()]
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("a number is not finite")
        explanation.lines()
    except (TypeError, ValueError, KeyError, AttributeError) as problem:
        raise ConfigError(f"{name} has a damaged explanation: {problem}. Train again with --trace.") from problem
    return explanation
