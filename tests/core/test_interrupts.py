"""Signals: the first one is noted, the second one ends the run."""

import os
import signal
import subprocess
import sys

from lockstep.core.interrupts import Interrupts, undone_when_terminated

PROGRAM = """
import os, signal, sys
from lockstep.core.interrupts import Interrupts, undone_when_terminated

class Busy:
    # standard error while a line is being written to it: whoever writes now gets this error
    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")
    flush = write

with Interrupts(notify=True) as interrupts:
    stderr, sys.stderr = sys.stderr, Busy()
    os.kill(os.getpid(), signal.SIGTERM)
    sys.stderr = stderr
    assert interrupts.requested
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        print("the second one ends it")
"""


def test_the_note_does_not_go_through_a_buffer_that_may_be_in_use():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "the second one ends it\n"
    assert done.stderr == "\nstopping after this step; press Ctrl-C again to end it now\n"


def test_who_counts_signals_gets_no_exception_that_could_be_lost():
    with Interrupts(signals=[signal.SIGUSR1], raises=False) as interrupts:
        for count in range(1, 4):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert interrupts.requested
            assert interrupts.count == count


def test_one_inside_another_passes_the_signal_on():
    how = {"signals": [signal.SIGUSR1], "raises": False}
    with Interrupts(**how) as outer:
        with Interrupts(**how) as inner:
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (outer.count, inner.count) == (2, 1)


UNDOING = """
import os, signal
from lockstep.core.interrupts import undone_when_terminated

with undone_when_terminated():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("undone", flush=True)
"""


def test_what_was_begun_is_undone_when_the_program_is_terminated():
    done = subprocess.run([sys.executable, "-c", UNDOING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("undone\n", "", 128 + signal.SIGTERM)


def test_a_handler_of_the_program_is_not_replaced():
    with Interrupts() as interrupts, undone_when_terminated():
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.requested
    with undone_when_terminated():
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
