"""The folder of a run that was done before it was resumed: it stays as it is, if it says what the run has come to."""

import os

from safetensors.numpy import save

from lockstep.core.errors import ConfigError
from lockstep.core.files import read_regular
from lockstep.report.events import Event, Result, RunDone
from lockstep.report.run_files import read_recorded
from lockstep.report.runlog import RunLog

MORE_BYTES = 1 << 20  # than it should have; a larger file is another one


class FinishedLog:
    """Writes the events of the run to its log only if a file was lost or damaged since it was done."""

    def __init__(self, log: RunLog) -> None:
        self._log, self._events = log, list[Event]()

    def write(self, event: Event) -> None:
        """Keeps the event until the last one, which has the result."""
        self._events.append(event)
        if isinstance(event, RunDone) and not self._has(event.result):
            for each in self._events:
                self._log.write(each)

    def _has(self, result: Result) -> bool:
        """Whether result.json and the weights are there, and are those of `result`."""
        folder = self._log.folder
        files = {"weights.safetensors": save({**result.params, **result.buffers})}
        if result.ema:
            files["ema.safetensors"] = save(result.ema)
        try:
            recorded = read_recorded(folder).result
            is_good = all(read_regular(folder / name, len(own) + MORE_BYTES) == own for name, own in files.items())
        except (ConfigError, OSError):
            return False
        known = ("weights_sha256", "buffers_sha256", "steps")
        return (
            is_good
            and recorded.keys() >= result.summary().keys()
            and all(recorded[name] == getattr(result, name) for name in known)
            and len(recorded["history"]) == len(result.history)
            and os.path.isfile(folder / "curve.png")
        )
