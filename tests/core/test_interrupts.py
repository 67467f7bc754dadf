"""Signals: the first one is noted, the second one ends the run."""

import os
import signal
import sys

import pytest

from lockstep.core.interrupts import Interrupts


class Busy:
    """Standard error while a line is being written to it: whoever writes now gets this error."""

    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    flush = write


def test_the_note_does_not_go_through_a_buffer_that_may_be_in_use(monkeypatch, capfd):
    with Interrupts(notify=True) as interrupts:
        monkeypatch.setattr(sys, "stderr", Busy())
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.undo()
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "\nstopping after this step; press Ctrl-C again to end it now\n"
