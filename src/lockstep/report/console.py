"""A run on the terminal: a progress bar on standard error, or plain lines where that is not a terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lockstep.core.files import printable
from lockstep.core.random_state import random_state_kept
from lockstep.core.terminal import wrapped
from lockstep.report.events import EpochDone, Event, Incident, Result, RunDone, RunStarted, RunStopped, StepDone, Traced
from lockstep.report.result_tables import device_names, short
from lockstep.report.waterfall_text import waterfall_lines

with random_state_kept():
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SIZES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}  # of memory, in bytes
PLAIN_LINE_SECONDS = 10.0  # in a log, a line within an epoch at most this often


class Output(RichConsole):
    """Standard error. When its reader is gone (`2>&1 | head`), the run continues in silence."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Console:
    """Shows events as they come. Use it as a context manager; the bar is removed at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._out = Output(file=stream or sys.stderr, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%{task.fields[loss]}  {task.fields[speed]:>7,.0f} samples/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._out,
            transient=True,
        )
        self._started: RunStarted | None = None
        self._start_epoch()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *error: object) -> None:
        _end(self._progress)

    def show(self, event: Event) -> None:
        """Shows one event."""
        match event:
            case RunStarted():
                self._run_started(event)
            case StepDone():
                self._step_done(event)
            case EpochDone():
                self._epoch_done(event)
            case Incident(sentence=sentence):
                self.note(sentence)
            case Traced():
                for line in self._traced(event):
                    self.note(line)
            case RunStopped():
                _end(self._progress)
            case RunDone(result):
                _end(self._progress)
                for line in last_lines(result):
                    self.note(line)

    def note(self, sentence: str) -> None:
        """Shows a sentence. On a terminal, which would break a long line inside a word, it is wrapped between words."""
        text = wrapped(printable(sentence), self._out.width if self._out.is_terminal else None)
        self._out.print(text, soft_wrap=True, markup=False, emoji=False)

    def _traced(self, event: Traced) -> list[str]:
        """The lines about a trace; the bars of its table as wide as the terminal has room for."""
        if not (event.lines and event.explanation and self._out.is_terminal):
            return event.lines or [event.sentence]
        table = waterfall_lines(event.explanation, self._out.width)
        return [*table, *event.lines[len(table) :]]

    def _run_started(self, event: RunStarted) -> None:
        self._started = event
        needs_bar = self._out.is_terminal and not self._progress.task_ids
        if event.num_restarts and needs_bar:
            self._out.file.write("\r\x1b[2K")  # the bar of a process that has ended
        is_described = event.num_restarts and event.step  # by the process that started the run
        for note in event.notes if is_described else description(event):
            self.note(note)
        if needs_bar:
            total = event.config["num_epochs"] * event.steps_per_epoch
            self._progress.add_task("", total=total, completed=event.step, speed=0, loss="")
            self._progress.start()
        self._start_epoch()

    def _start_epoch(self) -> None:
        self._epoch_began = self._last_line = time.monotonic()
        self._num_samples = 0

    def _step_done(self, event: StepDone) -> None:
        assert self._started is not None
        now, epochs = time.monotonic(), self._started.config["num_epochs"]
        self._num_samples += event.num_samples
        speed = self._num_samples / max(now - self._epoch_began, 1e-9)
        epoch = f"epoch {event.epoch}/{epochs}"
        if self._out.is_terminal:
            (task,) = self._progress.task_ids
            loss = f"  loss {short(event.loss)}" if event.loss == event.loss else ""
            self._progress.update(task, completed=event.step, description=epoch, speed=speed, loss=loss)
        elif now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            left = (epochs * self._started.steps_per_epoch - event.step) * self._started.config["batch_size"] / speed
            loss = f" loss {short(event.loss)}," if event.loss == event.loss else ""
            self.note(f"{epoch}: step {event.step},{loss} {speed:,.0f} samples/s, about {left:.0f} s left")

    def _epoch_done(self, event: EpochDone) -> None:
        assert self._started is not None
        self.note(epoch_line(event, self._started.config["num_epochs"]))
        self._start_epoch()


@contextmanager
def fetch_progress() -> Iterator["FetchProgress"]:
    """Shows the progress of a download while it lasts."""
    progress = FetchProgress(Output(file=sys.stderr, highlight=False))
    try:
        yield progress
    finally:
        _end(progress.bar)


class FetchProgress:
    """Called with (what, bytes so far, bytes in all): a bar on a terminal, else a line for each file."""

    def __init__(self, out: RichConsole) -> None:
        self.out = out
        self.bar = Progress(console=out, transient=True)
        self._tasks: dict[str, int] = {}

    def __call__(self, what: str, num_bytes: int, num_bytes_in_all: int) -> None:
        total = num_bytes_in_all or None
        if what not in self._tasks:
            self._tasks[what] = self.bar.add_task(f"fetching {what}", total=total)
            if self.out.is_terminal:
                self.bar.start()
            else:
                self.out.print(f"fetching {what}", markup=False)
        self.bar.update(self._tasks[what], completed=num_bytes, total=total)  # type: ignore[arg-type]


def description(event: RunStarted) -> list[str]:
    """The lines that a run starts with."""
    config = event.config
    test = f" and {event.num_test_samples:,} test" if event.num_test_samples else ""
    lines = [
        f"{event.model or config['model']} ({event.num_parameters:,} parameters) on {config['data']} "
        f"({event.num_train_samples:,} training{test} samples)",
        f"batch {config['batch_size']} in {config['num_shards']} shards, {_optimization(config)}{_split(config)}"
        f"exchange {config['exchange']}, engine {config['engine']}, {config['backend']} {event.backend_version} "
        f"on {_kind_of(event.devices)} [{device_names(event.devices)}]",
        *event.notes,
    ]
    if not event.keeps_bits:
        lines.append(f"The exchange {config['exchange']} adds in an order of its own: the bits depend on the devices.")
    if config["num_shards"] > config["batch_size"]:
        lines.append(f"A batch of {config['batch_size']} fills only {config['batch_size']} of the shards.")
    return lines


def epoch_line(event: EpochDone, num_epochs: int) -> str:
    """The line of an epoch."""
    epoch = f"epoch {event.epoch:>{len(str(num_epochs))}}/{num_epochs}"
    return f"{epoch}  loss {short(event.train_loss)}  {_metrics(event)}{event.seconds:.1f} s"


def last_lines(result: Result) -> list[str]:
    """The lines that a run ends with, before its result."""
    lines = []
    if result.peak_memory:
        peaks = ", ".join(f"{device} {size(peak)}" for device, peak in result.peak_memory.items())
        lines.append(f"peak memory: {peaks}{' (the whole process)' if 'cpu' in result.peak_memory else ''}")
    held = [sum(of_rank.values()) for of_rank in result.device_memory]
    if len(held) > 1:
        by_device = ", ".join(f"{device} {size(each)}" for device, each in zip(result.devices, held, strict=True))
        each = f"{size(held[0])} on every device" if len(set(held)) == 1 else by_device
        lines.append(f"parameters, gradients and optimizer state: {each}")
    if result.run is not None:
        lines.append(f"recorded in {result.run} (curve.png, weights.safetensors, ...)")
    return lines


def _optimization(config: dict[str, Any]) -> str:
    """The learning rate, and every other setting of the optimization that is not the default."""
    names = {"learning_rate": "lr", "momentum": "momentum", "weight_decay": "weight decay", "clip_norm": "clip norm"}
    parts = [config["optimizer"]] if config["optimizer"] != "sgd" else []
    parts += [f"{words} {config[name]:g}" for name, words in names.items() if config[name]]
    parts += [f"warm-up {config['warmup']}"] if config["warmup"] else []
    parts += [config["schedule"]] if config["schedule"] != "constant" else []
    parts += ["batch norm sync"] if config["batch_norm"] == "sync" else []
    parts += [config["precision"]] if config["precision"] != "fp32" else []
    return "".join(f"{part}, " for part in parts)


def _split(config: dict[str, Any]) -> str:
    """What devices share, where it is not the data alone."""
    split = config["split"]
    parts = [f"split {split}"] if "network" in split or "layers" in split else []
    parts += [config["pipeline"]] if "network" in split else []
    parts += [f"{config['num_slices']} slices"] if config["num_slices"] else []
    parts += ["update sharded"] if config["update"] == "sharded" else []
    return "".join(f"{part}, " for part in parts)


def _metrics(event: EpochDone) -> str:
    named = {} if event.test_accuracy is None else {"acc": f"{event.test_accuracy:.4f}"}
    named |= {name: f"{value:.4g}" for name, value in event.metrics.items() if name != "accuracy"}
    return "".join(f"test {name} {value}  " for name, value in named.items())


def size(num_bytes: float) -> str:
    """Bytes for people.

    >>> size(1_300_000_000), size(420_000_000), size(2_100_000), size(4_500)
    ('1.3 GB', '420 MB', '2.1 MB', '4.5 kB')
    """
    unit, scale = next(((unit, scale) for unit, scale in SIZES.items() if num_bytes >= scale), ("kB", 1e3))
    return f"{num_bytes / scale:,.{0 if num_bytes >= 10 * scale and unit != 'GB' else 1}f} {unit}"


def _kind_of(devices: list[str]) -> str:
    """What the devices are: a number of them means GPUs or logical CPU devices, and the user wants to know which."""
    num_gpus = len({device for device in devices if device.startswith("cuda")})
    if not num_gpus:
        return f"{len(devices)} logical CPU device{'s' * (len(devices) > 1)}"
    listed = f", listed {len(devices)} times" if num_gpus < len(devices) else ""
    return f"{num_gpus} GPU{'s' * (num_gpus > 1)}{listed}"


def _end(progress: Progress) -> None:
    """Removes the bar. Stopping one that never started would print an empty line."""
    if progress.live.is_started:
        progress.stop()
