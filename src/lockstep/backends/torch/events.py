"""The clock of a GPU, for traces: CUDA events around the work, read when the run is over."""

import time

import torch

NUM_TRIED = 5  # events, of which the one counts that was waited for least: others may use the GPU, too
MAX_MS = 1e3  # between two events: CUDA gives a number with 24 bits, of which the last is then 0.06 us


class CudaEvents:
    """Moments on one GPU. The first event is recorded while it is idle: that is when its clock and the host's meet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: torch.cuda.Event | None = None  # an event whose moment is known
        self._at = 0.0  # when the GPU came to it, on the host's clock

    def record(self) -> torch.cuda.Event | None:
        """An event on the calling thread's stream; None while a CUDA graph is captured, which would contain it."""
        if torch.cuda.is_current_stream_capturing():
            return None
        if self._known is None:
            torch.cuda.current_stream(self._device).synchronize()  # not the GPU: another rank may capture there
            _, self._at, self._known = min((self._tried() for _ in range(NUM_TRIED)), key=lambda found: found[0])
        return self._recorded()

    def seconds(self, event: torch.cuda.Event) -> float:
        """When the GPU came to an event; waits for it."""
        assert self._known is not None, "it has recorded one"
        event.synchronize()
        elapsed = float(self._known.elapsed_time(event))
        at = self._at + 1e-3 * elapsed
        if elapsed > MAX_MS:  # events are read in about the order of their recording
            self._known, self._at = event, at
        return at

    def _tried(self) -> tuple[float, float, torch.cuda.Event]:
        """How long it took until an event was over, the moment in the middle, and the event."""
        began, event = time.monotonic(), self._recorded()
        event.synchronize()
        seconds = time.monotonic() - began
        return seconds, began + seconds / 2, event

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
