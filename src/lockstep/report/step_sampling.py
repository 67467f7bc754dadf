"""Which steps are written down, and what of them: a run has some hundred such lines, however long it is."""

from lockstep.report.events import RunStarted, StepDone

LINES_PER_RUN = 300


class StepSampling:
    """Picks one in every `log_every` steps of a run."""

    def __init__(self, started: RunStarted) -> None:
        every = started.config.get("log_every")
        total = started.config["num_epochs"] * started.steps_per_epoch
        self._every: int = max(1, round(total / LINES_PER_RUN)) if every is None else every
        self._epoch, self._seconds, self._num_samples = 0, 0.0, 0  # since the last line

    def sampled(self, event: StepDone) -> dict[str, float | None]:
        """Loss, learning rate and throughput, if this step is one of them. Called with every step."""
        if event.epoch != self._epoch:
            self._epoch, self._seconds, self._num_samples = event.epoch, 0.0, 0
        self._num_samples += event.num_samples
        if not self._every or event.step % self._every:
            return {}
        seconds = event.seconds - self._seconds
        speed = round(self._num_samples / seconds, 1) if seconds > 0 else None
        self._seconds, self._num_samples = event.seconds, 0
        return {"loss": event.loss, "learning_rate": event.learning_rate, "samples_per_second": speed}
