"""How a command ends when something is wrong: one sentence, and the exit status that goes with it."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lockstep.cli.output import note
from lockstep.core.errors import Interrupted, LockstepError, RankError
from lockstep.core.files import printable
from lockstep.core.source_lines import user_traceback
from lockstep.core.torchrun_env import torchrun_env


@contextmanager
def plain_errors() -> Iterator[None]:
    """Ends the program with a sentence if there is an error. Exit status: 2 impossible, 1 failed, 130 interrupted."""
    try:
        yield
    except LockstepError as error:
        if is_reported_elsewhere() if error.is_reported is None else error.is_reported:
            _exit(error)
        cause = error.__cause__ if isinstance(error, RankError) else None
        if trace := error.trace if cause is None else user_traceback(cause):
            print(trace, file=sys.stderr)
        note(f"lockstep: {printable(str(error))}")
        _exit(error)
    except KeyboardInterrupt:
        exit_with("interrupted.", Interrupted.exit_status)
    except BrokenPipeError:  # the reader of standard output has gone (`| head`)
        _discard_standard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as problem:  # standard output is full or closed: files have errors of their own
        _discard_standard_output()
        exit_with(f"standard output cannot be written: {problem.strerror}.", LockstepError.exit_status)


def _exit(error: LockstepError) -> NoReturn:
    if error.ends_at_once:
        os._exit(error.exit_status)
    raise SystemExit(error.exit_status) from None


def is_reported_elsewhere() -> bool:
    """Whether another process of the same torchrun has printed the error: all of them find the same one."""
    env = torchrun_env()
    if env is None or env.size == 1:
        return False
    from lockstep.training.torchrun import is_reported, store_of  # loads its framework

    try:
        return is_reported(store_of(env, 10.0))
    except LockstepError:
        return False


def _discard_standard_output() -> None:
    """Buffered output goes to /dev/null: Python would fail on it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_with(sentence: str, status: int) -> NoReturn:
    """Ends the program with a sentence on standard error."""
    note(f"lockstep: {printable(sentence)}")
    raise SystemExit(status)
