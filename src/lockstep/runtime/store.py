"""The store in which processes find each other, and the network that it is reached by: PyTorch's TCPStore."""

import contextlib
import fcntl
import os
import socket
import struct
import tempfile
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from lockstep.core.errors import PeerFailure, first_line

LOOPBACK = "127.0.0.1"


class Store(Protocol):
    """Where processes write down what the others have to know."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def serve_store() -> tuple[Store, int, int]:
    """A store that only this machine can reach, its port, and the descriptor it listens on."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(1024)
        port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
    store = dist.TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=descriptor, wait_for_workers=False)
    return store, port, descriptor


def join_store(host: str, port: int, timeout: float) -> Store:
    """A connection to the store that others have opened."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as problem:
        raise PeerFailure(f"The store at {host}:{port} cannot be reached: {first_line(problem)}.") from problem


def private_file() -> int:
    """The descriptor of a file without a name, in memory: only processes that inherit it can open it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def file_store(descriptor: int, timeout: float) -> Store:
    """A store in such a file, for connections to be made."""
    store = dist.FileStore(f"/proc/self/fd/{descriptor}", -1)
    store.set_timeout(timedelta(seconds=timeout))
    return store


def prefix_store(prefix: str, store: Store) -> Store:
    """The part of a store whose keys begin with `prefix`."""
    return dist.PrefixStore(prefix, store)


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`: loopback, unless the user named another machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the network interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
