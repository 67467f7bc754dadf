"""The time of compilation in an epoch: what the first step of each batch size took longer than later ones."""

from statistics import median


class StepTimes:
    """The seconds of the steps of an epoch, by batch size."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = {}  # of this epoch's steps
        self._seen: set[int] = set()  # batch sizes whose first step was in an earlier epoch

    def add(self, num_samples: int, seconds: float) -> None:
        """A step with this many samples took so long."""
        self._seconds.setdefault(num_samples, []).append(seconds)

    def first_steps_extra(self) -> float:
        """Seconds that first steps took longer than later ones of the same size; ends the epoch.

        >>> times = StepTimes()
        >>> for num_samples, seconds in ((256, 5.0), (256, 1.0), (256, 1.0), (128, 2.5)):
        ...     times.add(num_samples, seconds)
        >>> times.first_steps_extra()  # a step of 256 takes 1 s, so one of 128 should take 0.5 s
        6.0
        """
        usual = {size: seconds if size in self._seen else seconds[1:] for size, seconds in self._seconds.items()}
        per_sample = [median(seconds) / size for size, seconds in usual.items() if seconds]
        extra = 0.0
        for size, seconds in self._seconds.items():
            if size not in self._seen and (usual[size] or per_sample):
                expected = median(usual[size]) if usual[size] else size * median(per_sample)
                extra += max(0.0, seconds[0] - expected)
        self._seen.update(self._seconds)
        self._seconds = {}
        return extra
