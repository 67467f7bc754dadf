"""Every error that Lockstep raises on purpose, and the exit status that each one means.

LockstepError
|- ConfigError     2  a setting that cannot be; nothing was started or written
|  |- DataError    2  a dataset that is not there, or is not what it should be
|  |- DeviceError  2  a device that this machine does not have
|  `- BackendError 2  a framework that is missing, or cannot do what was asked
`- RunError        1  the run was started and failed
   |- RankError    1  ... on one rank, in one phase; the cause is `__cause__`
   |- OutOfMemory  1  ... because a shard does not fit into a device's memory; says which number of shards does
   |- CaptureError 1  ... as a CUDA graph; users only see the reason: the run continues eagerly
   |- RankTimeout  1  ... because a thread of this process hangs
   |- PeerFailure  1  ... because other ranks failed, or did not arrive in time
   `- Interrupted 130  ... because the user ended it
"""

from typing import Any

from lockstep.core.source_lines import at


class LockstepError(Exception):
    """The base of all of them. The message is for the user."""

    exit_status = 1
    trace = ""  # the user's own traceback, where it comes from another process
    is_reported: bool | None = None  # another process has printed it already; None: not known
    ends_at_once = False  # a thread hangs that would keep the program from ending, or crash in it


class ConfigError(LockstepError):
    """The user asked for something impossible; nothing was started or written."""

    exit_status = 2


class DataError(ConfigError):
    """A dataset is not there, or is not what it should be."""


class DeviceError(ConfigError):
    """A device that this machine does not have."""


class BackendError(ConfigError):
    """A framework is missing, or cannot do what was asked."""


class RunError(LockstepError):
    """A run was started and failed."""

    has_diverged = False  # its loss, or a weight, is NaN or infinite


class RankError(RunError):
    """A failure of one rank: the rank, its device and the phase are named, the original is the cause."""

    def __init__(self, rank: int, device: str, phase: str, cause: BaseException, where: str = "") -> None:
        self.rank, self.device, self.phase = rank, device, phase
        super().__init__(f"rank {rank} ({device}), during {phase}: {type(cause).__name__}: {cause}{at(where)}")
        self.__cause__ = cause


class OutOfMemory(RunError):
    """A shard does not fit into a device's memory."""

    def __init__(self, rank: int, device: str, num_samples: int, advice: str, original: str, where: str = "") -> None:
        self.rank, self.device = rank, device
        super().__init__(
            f"rank {rank} ({device}), during forward and backward: a shard of {num_samples} "
            f"sample{'s' * (num_samples > 1)} does not fit into memory. {advice}. "
            f"The framework reported: {original.splitlines()[0] if original else 'nothing'}{at(where)}"
        )


class CaptureError(RunError):
    """Steps cannot be captured as a CUDA graph; they can be run eagerly."""


class PeerFailure(RunError):
    """Other ranks failed, or did not arrive in time; this one could continue."""

    timed_out = False  # no rank is known to have failed
    stragglers: tuple[int, ...] = ()  # ranks that are known not to have arrived


class RankTimeout(RunError):
    """A thread of this process hangs, and cannot be ended without ending the process."""

    ends_at_once = True


class Interrupted(RunError):
    """The user ended the run (Ctrl-C). What was trained until then is its `result`, where there is one."""

    exit_status = 130
    result: Any = None  # a Result


def first_line(problem: BaseException) -> str:
    """The first line of an error's message, without its full stop; the error's type where it has none."""
    return (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(".")
