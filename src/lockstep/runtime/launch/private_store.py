"""The store of a run's own processes. Nobody else can reach it: it listens nowhere.

The supervisor keeps the values. Each worker inherits one end of a pair of connected sockets when it is forked.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

POLL_SECONDS = 0.01
MAX_BYTES = 1 << 24  # of a message
LENGTH = struct.Struct("<I")
NO_MESSAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # raised by what is not one


class SupervisorGone(RuntimeError):
    """The process that keeps the store has ended: its workers do, too, and there is nobody to tell why."""


class PrivateStore:
    """The values, in the process of the supervisor, which serves its workers."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []  # ours, of the workers' connections

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            value = int(self._values.get(key, "0")) + amount
            self._values[key] = str(value)
            return value

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = str(value)

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def new_connection(self) -> socket.socket:
        """The end for a worker that is about to be forked."""
        ours, theirs = socket.socketpair()
        self._ends.append(ours)
        return theirs

    def serve(self, theirs: socket.socket) -> None:
        """Answers the worker that was forked with this end, in a thread, until it dies."""
        theirs.close()
        threading.Thread(target=self._serve, args=(self._ends[-1],), daemon=True, name="lockstep-store").start()

    def leave(self) -> None:
        """In a worker: it has its own end only."""
        for end in self._ends:
            end.close()

    def close(self) -> None:
        """Ends the connections."""
        for end in self._ends:
            with contextlib.suppress(OSError):  # the worker is gone
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends = []

    def _serve(self, end: socket.socket) -> None:
        try:
            while (request := _receive(end)) is not None:
                name, *arguments = request
                answers: dict[str, Callable[..., Any]] = {
                    "add": self.add, "set": self.set, "find": self._find, "check": self.check,
                }  # fmt: skip
                _send(end, answers[name](*arguments))
        except (OSError, *NO_MESSAGE):  # it was killed in the middle of a message
            return
        finally:
            end.close()  # a worker that still waits for an answer is told so

    def _find(self, key: str) -> str | None:
        with self._lock:
            return self._values.get(key)


class WorkerStore:
    """The same in a worker. Its threads ask one after the other; no answer takes long."""

    def __init__(self, end: socket.socket, seconds: float) -> None:
        self._end, self._seconds, self._lock = end, seconds, threading.Lock()

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def get(self, key: str) -> bytes:
        """Waits until it is there."""
        deadline = time.monotonic() + self._seconds
        while (found := self._ask("find", key)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{key} was not set within {self._seconds:g} s")
            time.sleep(POLL_SECONDS)
        return str(found).encode()

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            try:
                _send(self._end, request)
                answer = _receive(self._end)
            except (OSError, *NO_MESSAGE) as problem:
                raise SupervisorGone("the supervisor is gone") from problem
        if not answer:
            raise SupervisorGone("the supervisor is gone")
        return answer[0]


def _send(end: socket.socket, message: Any) -> None:
    content = json.dumps(message if isinstance(message, tuple) else [message]).encode()
    end.sendall(LENGTH.pack(len(content)) + content)


def _receive(end: socket.socket) -> list[Any] | None:
    """A message; None at the end of the connection."""
    head = _read(end, LENGTH.size)
    if head is None:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MAX_BYTES:
        raise ValueError(f"a message of {length} bytes")
    content = _read(end, length)
    return None if content is None else list(json.loads(content))


def _read(end: socket.socket, num_bytes: int) -> bytes | None:
    parts, left = [], num_bytes
    while left:
        part = end.recv(left)
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
