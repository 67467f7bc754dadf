"""Work in a thread of its own, which whoever waits for it can give up on."""

import threading
import time

import pytest

from lockstep.core.errors import PeerFailure
from lockstep.runtime.rank_thread import run_watched


def test_what_the_work_gives_or_raises_comes_out():
    assert run_watched("work", lambda: 7, lambda: time.sleep(0.001)) == 7
    with pytest.raises(ZeroDivisionError):
        run_watched("work", lambda: 1 // 0, lambda: time.sleep(0.001))


def test_who_waits_can_give_up_on_work_that_hangs_and_the_program_then_ends_at_once():
    goes_on = threading.Event()

    def give_up():
        raise PeerFailure("Another rank has failed.")

    try:
        with pytest.raises(PeerFailure) as failure:
            run_watched("work", goes_on.wait, give_up)
    finally:
        goes_on.set()
    assert failure.value.ends_at_once
    assert not PeerFailure("").ends_at_once
