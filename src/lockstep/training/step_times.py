"""How much of an epoch's time went into compilation: what the first step of each size of batch took longer than others."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median


class StepTimes:
    """The seconds of the steps of an epoch, by the size of their batch."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = {}  # of this epoch's steps
        self._seen: set[int] = set()  # sizes whose first step was in an epoch before

    @contextmanager
    def of(self, num_samples: int) -> Iterator[None]:
        """Measures a step with this many samples."""
        began = time.perf_counter()
        yield
        self._seconds.setdefault(num_samples, []).append(time.perf_counter() - began)

    def first_steps_extra(self) -> float:
        """Seconds that first steps took longer than later ones like them; ends the epoch.

        >>> times = StepTimes()
        >>> times._seconds = {256: [5.0, 1.0, 1.0], 128: [2.5]}
        >>> times.first_steps_extra()  # a step of 256 takes 1 s, so one of 128 should take 0.5 s
        6.0
        """
        usual = {size: _without_first(seconds, size in self._seen) for size, seconds in self._seconds.items()}
        per_sample = [median(seconds) / size for size, seconds in usual.items() if seconds]
        extra = 0.0
        for size, seconds in self._seconds.items():
            if size not in self._seen and (usual[size] or per_sample):
                expected = median(usual[size]) if usual[size] else size * median(per_sample)
                extra += max(0.0, seconds[0] - expected)
        self._seen.update(self._seconds)
        self._seconds = {}
        return extra


def _without_first(seconds: list[float], is_known: bool) -> list[float]:
    return seconds if is_known else seconds[1:]
