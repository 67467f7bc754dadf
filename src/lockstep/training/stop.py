"""All ranks stop after the same step: rank 0, which is asked to, tells the others now and then."""

import json
import time
from collections.abc import Callable

from lockstep.runtime.engine import Engine, has_all_ranks

SECONDS = 0.25  # between two times that rank 0 tells them, about


class StopAgreement:
    """Whether the run is to stop after a step: the same answer on all ranks."""

    def __init__(self, engine: Engine, is_asked_to_stop: Callable[[], bool]) -> None:
        self._engine, self._is_asked = engine, is_asked_to_stop
        self._is_alone = has_all_ranks(engine)
        self._calls_left, self._num_calls, self._told_at = 0, 1, time.monotonic()

    def stops(self) -> bool:
        """Called by all ranks after every step."""
        if self._is_alone:
            return self._is_asked()
        if self._calls_left:
            self._calls_left -= 1
            return False
        said = json.loads(self._engine.broadcast(0, self._tell))
        self._calls_left, self._num_calls = said["next"] - 1, said["next"]
        return bool(said["stops"])

    def _tell(self) -> bytes:
        """What rank 0 says: whether to stop, and after how many steps it will say so again."""
        now = time.monotonic()
        seconds_per_step = max(now - self._told_at, 1e-6) / self._num_calls
        self._told_at = now
        return json.dumps(
            {"stops": self._is_asked(), "next": min(1000, max(1, int(SECONDS / seconds_per_step)))}
        ).encode()
