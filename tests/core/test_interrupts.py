"""Signals: the first one is noted, the second one ends the run."""

import subprocess
import sys

PROGRAM = """
import os, signal, sys
from lockstep.core.interrupts import Interrupts

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
