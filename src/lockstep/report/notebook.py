"""A run in a notebook: a progress bar and the curves as they grow, in the cell that started it."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from html import escape
from typing import Any

from lockstep.core.interrupts import Interrupts
from lockstep.core.notebook_kernel import in_notebook as in_notebook
from lockstep.report.console import Console, description, epoch_line, last_lines
from lockstep.report.events import EpochDone, Event, Incident, Result, RunDone, RunStarted, RunStopped, StepDone, Traced
from lockstep.report.result_tables import short
from lockstep.report.runlog import to_json
from lockstep.report.step_sampling import StepSampling
from lockstep.report.svg import Chart, Series, epochs_range, line_chart

SECONDS = 0.25  # between two pictures
STYLE = """<style>
.lockstep-run { max-width: 760px; font: 13px/1.5 system-ui, sans-serif; }
.lockstep-run pre { margin: 0; padding: 0; font-size: 12px; white-space: pre-wrap; background: none; color: inherit; }
.lockstep-run progress { width: 220px; vertical-align: middle; accent-color: #2563c9; }
.lockstep-run div { display: flex; flex-wrap: wrap; gap: 8px; }
.lockstep-run figure { flex: 1 1 300px; margin: 6px 0 0; }
.lockstep-run svg { width: 100%; height: auto; }
.lockstep-run svg text { font: 11px sans-serif; fill: currentColor; opacity: .7; }
.lockstep-run .grid, .lockstep-run .base { stroke: currentColor; opacity: .15; fill: none; }
.lockstep-run .line { fill: none; stroke: #2563c9; stroke-width: 2; }
.lockstep-run .line.faint { stroke-width: 1; opacity: .4; }
.lockstep-run .dot { fill: #2563c9; }
</style>"""


def run_display() -> "Console | NotebookDisplay":
    """What shows a run: its progress in a notebook's cell, or on the terminal."""
    return NotebookDisplay() if in_notebook() else Console()


class NotebookDisplay:
    """Shows events as they come, as one output that changes. Use it as a context manager."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._steps: list[tuple[float, float]] = []
        self._epochs: list[EpochDone] = []
        self._started: RunStarted | None = None
        self._sampling: StepSampling | None = None
        self._bar, self._shown_at = "", 0.0
        self._handle: Any = None  # of the output, once there is one
        self._epoch_began, self._num_samples = time.monotonic(), 0

    def __enter__(self) -> "NotebookDisplay":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar = ""
        if self._started is not None:
            self._update(now=True)

    def show(self, event: Event) -> None:
        """Shows one event."""
        match event:
            case RunStarted():
                self._lines += event.notes if self._started is not None else description(event)
                self._started, self._sampling = event, self._sampling or StepSampling(event)
            case StepDone():
                self._step_done(event)
            case EpochDone():
                self._epochs.append(event)
                self._epoch_began, self._num_samples = time.monotonic(), 0
            case Incident(sentence=sentence) | Traced(sentence=sentence):
                self._lines.append(sentence)
            case RunDone(result):
                self._bar = ""
                self._lines += last_lines(result)
            case RunStopped():
                self._bar = ""
        self._update(now=not isinstance(event, StepDone))

    def note(self, sentence: str) -> None:
        """Shows a sentence."""
        self._lines.append(sentence)
        self._update(now=True)

    def _step_done(self, event: StepDone) -> None:
        assert self._started is not None
        assert self._sampling is not None
        started = self._started
        if self._sampling.sampled(event):
            self._steps.append((event.step / started.steps_per_epoch, event.loss))
        total = started.config["num_epochs"] * started.steps_per_epoch
        self._num_samples += event.num_samples
        speed = self._num_samples / max(time.monotonic() - self._epoch_began, 1e-9)
        left = (total - event.step) * started.config["batch_size"] / speed
        said = f"epoch {event.epoch}/{started.config['num_epochs']}, loss {short(event.loss)}, {speed:,.0f} samples/s"
        self._bar = f'<progress max="{total}" value="{event.step}"></progress> {said}, about {left:.0f} s left'

    def _update(self, now: bool) -> None:
        if not now and time.monotonic() < self._shown_at + SECONDS:
            return
        self._shown_at = time.monotonic()
        from IPython.display import display

        shown = {"text/html": self.html(), "text/plain": self.text()}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(shown, raw=True)

    def html(self) -> str:
        """The output as it is now."""
        lines = escape("\n".join(self._lines))
        return (
            f'{STYLE}<section class="lockstep-run"><pre>{lines}</pre>{self._bar}<div>{self._charts()}</div></section>'
        )

    def text(self) -> str:
        """The same for who has no pictures: a line for each epoch."""
        epochs = self._started.config["num_epochs"] if self._started else 1
        return "\n".join([*self._lines, *(epoch_line(done, epochs) for done in self._epochs)])

    def _charts(self) -> str:
        if self._started is None:
            return ""
        across = epochs_range(float(self._started.config["num_epochs"]))
        losses = [(float(done.epoch), done.train_loss) for done in self._epochs]
        accuracies = [(float(d.epoch), d.test_accuracy) for d in self._epochs if d.test_accuracy is not None]
        loss = [Series("steps", self._steps, is_faint=True), Series("epochs", losses)]
        charts = [Chart("training loss", "", loss, across)]
        charts.append(Chart("test accuracy", "", [Series("epochs", accuracies)], across, (0.0, 1.0)))
        drawn = [(chart.title, line_chart(chart)) for chart in charts]
        return "".join(f"<figure>{title}{svg}</figure>" for title, svg in drawn if svg)


class Forward:
    """The events of a run in another process, as lines of JSON: that process cannot show anything in a notebook."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._last_step = descriptor, 0.0

    def write(self, event: Event) -> None:
        """Sends one event; of steps, a few a second."""
        if isinstance(event, StepDone):
            if time.monotonic() < self._last_step + SECONDS / 2:
                return
            self._last_step = time.monotonic()
        if isinstance(event, RunStopped):
            return  # the error that follows says why
        plain: dict[str, Any] = event.result.summary() if isinstance(event, RunDone) else asdict(event)
        line = to_json({"event": type(event).__name__, **plain, **({"chrome": []} if "chrome" in plain else {})})
        content = line.encode() + b"\n"
        while content:
            content = content[os.write(self._descriptor, content) :]


def event_of(line: str) -> Event:
    """The event that `Forward` has sent."""
    plain = json.loads(line)
    kind = plain.pop("event")
    if kind == "RunDone":
        history = [EpochDone(**done) for done in plain.pop("history")]
        return RunDone(Result(**{**plain, "history": history, "params": {}}))
    if kind == "StepDone" and plain["loss"] is None:
        plain["loss"] = float("nan")
    made: Event = {each.__name__: each for each in (RunStarted, StepDone, EpochDone, Incident, Traced)}[kind](**plain)
    return made


@contextmanager
def shown_here() -> Iterator[Forward]:
    """Shows in this process what another, forked from it, writes into the `Forward`; and that an interrupt was seen."""
    receiving, sending = os.pipe()

    def show_all() -> None:
        with open(receiving, encoding="utf-8") as lines, NotebookDisplay() as display:
            for line in lines:
                display.show(event_of(line))

    thread = threading.Thread(target=show_all, name="lockstep notebook", daemon=True)
    thread.start()
    try:
        with Interrupts(notify=True, raises=False):  # the one of the run, inside this one, is quiet
            yield Forward(sending)
    finally:
        os.close(sending)
        thread.join(timeout=10)
