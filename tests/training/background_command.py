"""Commands in the background, in processes that are forked from one that has imported everything already.

Importing PyTorch and Lockstep takes three seconds of CPU time; the tests that kill and interrupt processes start many.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import lockstep.cli

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["pytest", "torch._inductor", "lockstep.cli", "lockstep.api", "lockstep.report.plots"]
    + ["lockstep.training.elastic", "lockstep.training.torchrun", "lockstep.training.module_task"]
)


def run_command(arguments, folder, environment, out, err):
    """The whole life of the process, in a session of its own."""
    os.setsid()
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what runs in the background
    os.chdir(folder)
    os.environ.update(environment)
    sys.path.insert(0, str(folder))  # as Python does
    if arguments[0].endswith(".py"):
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        lockstep.cli.main(arguments)


class BackgroundCommand:
    """`lockstep ARGUMENTS`, or a Python file; what it prints goes to files. The methods are those of `Popen`."""

    def __init__(self, folder, arguments, **environment):
        self.out, self.err = (Path(folder) / f".{kind}-{time.monotonic_ns()}" for kind in ("out", "err"))
        arguments = [str(argument) for argument in arguments]
        self._process = FORKSERVER.Process(
            target=run_command, args=(arguments, Path(folder), environment, self.out, self.err)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it still runs after {timeout} s: {self.err.read_text()}"

    def communicate(self, timeout=None):
        """What it printed, once it has ended."""
        self.wait(timeout)
        return self.out.read_text(), self.err.read_text()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill_all(self):
        """SIGKILL to all processes of the command at once."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(60)
