"""Where the time of a step went, as text: a table with bars, as wide as there is room."""

from typing import Any

BAR = 30  # characters of the longest bar


def waterfall_lines(explanation: dict[str, Any], width: int | None = None) -> list[str]:
    """The lines of the table, none longer than `width`: the bars are shorter, or left out, where there is less room."""
    perfect, k = explanation["perfect_ms"], explanation["num_devices"]
    rows = [("one device, nothing else" if k == 1 else f"{k} times as fast as one", perfect, perfect)]
    so_far = perfect
    for name, ms in [*explanation["parts"].items(), ("rest", explanation["rest_ms"])]:
        so_far += ms
        rows.append((f"+ {name}", ms, so_far))
    widest = max(len(name) for name, _, _ in rows)
    longest = max(end for _, _, end in rows)
    room = BAR if width is None else max(0, min(BAR, width - widest - 24))  # of names and two columns of numbers
    scale = room / max(explanation["step_ms"], longest, 1e-9)
    found = [f"{'where a step goes':{widest}}  {'ms':>9}  {'so far':>9}"]
    for name, ms, end in rows:
        start, stop = round(scale * max(0.0, end - ms)), round(scale * max(0.0, end))
        bar = f"{' ' * start}{'#' * (stop - start)}"
        found.append(f"{name:{widest}}  {_shown(ms):>9}  {_shown(end):>9}  {bar}".rstrip())
    measured = f"{'measured':{widest}}  {_shown(explanation['step_ms']):>9}"
    return [*found, f"{measured}  (mean of {explanation['num_steps']} steps)"]


def _shown(ms: float) -> str:
    """Two digits; never -0.00."""
    return f"{round(ms, 2) + 0.0:.2f}"
