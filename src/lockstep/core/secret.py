"""A secret of the user's, by which processes that torchrun has started know each other.

It is a file that only the user can read: `LOCKSTEP_SECRET_FILE`, or one that is made in the user's configuration.
Between machines, it has to be the same file, or a copy of it.
"""

import contextlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from lockstep.core.errors import ConfigError
from lockstep.core.files import read_regular

VARIABLE = "LOCKSTEP_SECRET_FILE"
MIN_BYTES, MAX_BYTES = 16, 4096


def secret_for(purpose: str) -> bytes | None:
    """A key for one purpose, that whoever has the user's secret can make; None where it can be kept nowhere."""
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else _default_path()
    if not named:
        try:
            _make(path)
        except OSError:
            return None
    try:
        content = read_regular(path, MAX_BYTES)
        mode = path.stat().st_mode
    except OSError as problem:
        raise ConfigError(f"The secret in {path} cannot be read: {problem.strerror} ({VARIABLE}).") from problem
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"Others can read the secret in {path}: use chmod 600 {path}.")
    if len(content) < MIN_BYTES:
        raise ConfigError(
            f"The secret in {path} has {len(content)} bytes, and needs {MIN_BYTES} at least ({VARIABLE})."
        )
    return hmac.digest(content, purpose.encode(), "sha256")


def _default_path() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "lockstep" / "secret"


def _make(path: Path) -> None:
    """Makes the file, where there is none; complete, or not at all."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".part-{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.link(temporary, path)
    finally:
        temporary.unlink()


def proof_of(secret: bytes, source: int, target: int, nonce: bytes) -> bytes:
    """That rank `source` has the secret, for `target`, which has chosen the nonce."""
    return hmac.digest(secret, f"lockstep rank {source} to {target} ".encode() + nonce, "sha256")
