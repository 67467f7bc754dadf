"""How a command ends when something is wrong: one plain sentence and the exit status of the contract."""

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from lockstep.core.errors import Interrupted, Late, LockstepError, RankError
from lockstep.core.torchrun_env import place_of_this_process
from lockstep.core.entry_points import user_traceback


def plain_answers(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with errors as sentences. Exit status: 2 impossible, 1 failed, 130 interrupted."""

    @wraps(command)
    def answering(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except LockstepError as error:
            if is_said_elsewhere() if error.is_said is None else error.is_said:
                raise SystemExit(error.exit_status) from None
            cause = error.__cause__ if isinstance(error, RankError) else None
            trace = error.trace if cause is None else user_traceback(cause)
            if trace:
                print(trace, file=sys.stderr)
            if isinstance(error, Late):  # what hangs would keep the program, or fall with it
                print(f"lockstep: {error}.", file=sys.stderr, flush=True)
                os._exit(error.exit_status)
            leave(str(error), error.exit_status)
        except KeyboardInterrupt:
            leave("interrupted.", Interrupted.exit_status)
        except BrokenPipeError:  # the reader of standard output has gone (`| head`): nothing to tell it
            _give_up_standard_output()
            raise SystemExit(128 + signal.SIGPIPE) from None
        except OSError as problem:  # standard output is full or closed: files have errors of their own
            _give_up_standard_output()
            leave(f"the answer cannot be written: {problem.strerror}.", LockstepError.exit_status)

    return answering


def is_said_elsewhere() -> bool:
    """Whether another process of the same torchrun has said already what is wrong: all of them find the same."""
    place = place_of_this_process()
    if place is None or place.size == 1:
        return False
    from lockstep.training.torchrun import is_said, store_of  # loads its framework

    try:
        return is_said(store_of(place, 10.0))
    except LockstepError:
        return False


def _give_up_standard_output() -> None:
    """What is still to be written goes nowhere; Python would fail on it a second time when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(sentence: str, status: int) -> NoReturn:
    """Ends the program with a sentence on standard error."""
    print(f"lockstep: {sentence}", file=sys.stderr)
    raise SystemExit(status)
