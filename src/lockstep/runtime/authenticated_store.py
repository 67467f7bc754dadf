"""A store that anybody can write to, of which only what this run's ranks have written is read.

Each value carries an HMAC-SHA256 over its key and itself, made with a secret that only the ranks have. A value without
one is as if it were not there: nobody parses it, least of all Gloo, which crashes on addresses that are none.
"""

import hmac
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.core.errors import PeerFailure
from lockstep.runtime.store import Store

MARK_BYTES = 32
POLL_SECONDS = 0.01
FOREIGN_SECONDS = 10.0  # for a rank to write over what somebody else has written before it
SAME_SECRET = "On several machines, all need the same secret: a file that LOCKSTEP_SECRET_FILE names, with mode 600"


class AuthenticatedStore(dist.Store):  # type: ignore[misc]  # PyTorch's has no types
    """`store`, with marks. Gloo calls it from C++, for which somebody has to keep a reference to this object."""

    def __init__(self, store: Store, secret: bytes, timeout: float) -> None:
        super().__init__()
        self.plain = store  # without marks
        self._store: Any = store  # which takes bytes, too
        self._secret, self._seconds = secret, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value with its mark."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._mark(key, content) + content)

    def get(self, key: str) -> bytes:
        """The value that one of the ranks has written; waits for it."""
        self.wait([key])
        found = self._find(key)
        if found is None:  # somebody has written something else since
            raise self._missing([key])
        return found

    def check(self, keys: list[str]) -> bool:
        """Whether ranks have written all of these."""
        return all(self._find(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until they have."""
        deadline = time.monotonic() + (self._seconds if timeout is None else timeout.total_seconds())
        is_foreign = False
        while not self.check(keys):
            now = time.monotonic()
            if now > deadline:
                raise self._missing(keys)
            if not is_foreign and self._foreign(keys):
                is_foreign, deadline = True, min(deadline, now + FOREIGN_SECONDS)
            time.sleep(POLL_SECONDS)

    def add(self, key: str, amount: int) -> int:
        """A count without a mark, which anybody can change: nothing that matters may depend on it."""
        return int(self._store.add(key, amount))

    def clone(self) -> "AuthenticatedStore":
        """The same: it may be used by several threads."""
        return self

    def _find(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        said: bytes = self._store.get(key)
        mark, content = said[:MARK_BYTES], said[MARK_BYTES:]
        return content if hmac.compare_digest(mark, self._mark(key, content)) else None

    def _mark(self, key: str, content: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, len(name).to_bytes(8, "little") + name + content, "sha256")

    def _missing(self, keys: list[str]) -> Exception:
        if foreign := self._foreign(keys):
            what = f"What another program has written as {foreign[0]} into the store of all ranks"
            return PeerFailure(f"{what} does not belong to this run. {SAME_SECRET}")
        return RuntimeError(f"{', '.join(keys)}: not set, timed out")

    def _foreign(self, keys: list[str]) -> list[str]:
        """Those that have a value, but not from a rank."""
        return [key for key in keys if self._store.check([key]) and self._find(key) is None]


def without_marks(store: Store) -> Store:
    """The same for NCCL, whose threads outlive Python and must not call it."""
    return store.plain if isinstance(store, AuthenticatedStore) else store
