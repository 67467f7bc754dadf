"""A store that anybody can write to: what was written without the secret is as if it were not there."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lockstep.core.device import Device
from lockstep.core.errors import PeerFailure
from lockstep.runtime import authenticated_store
from lockstep.runtime.authenticated_store import AuthenticatedStore
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.store import LOOPBACK, prefix_store

SECRET = b"known to the ranks only"


@pytest.fixture
def shared():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    return store


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(authenticated_store, "FOREIGN_SECONDS", 0.05)


@pytest.mark.parametrize("value", ["", "text", "\x00", b"\xff\x00bytes" * 1000])
def test_ranks_read_what_ranks_have_written(shared, value):
    AuthenticatedStore(shared, SECRET, 1.0).set("key", value)
    found = AuthenticatedStore(shared, SECRET, 1.0)
    assert found.get("key") == (value.encode() if isinstance(value, str) else value)
    assert found.check(["key"])
    assert not found.check(["key", "other"])


FORGED = {
    "nothing": lambda own: b"",
    "plain": lambda own: b"value",
    "a mark of zeros": lambda own: bytes(32) + b"value",
    "cut off": lambda own: own[:-1],
    "longer": lambda own: own + b"\0",
    "a wrong bit": lambda own: own[:-1] + bytes([own[-1] ^ 1]),
}


@pytest.mark.parametrize("forged", FORGED)
def test_what_others_write_is_not_read(shared, forged):
    store = AuthenticatedStore(shared, SECRET, 1.0)
    store.set("key", "value")
    shared.set("key", FORGED[forged](shared.get("key")))
    assert not store.check(["key"])
    with pytest.raises(PeerFailure, match="as key into the store of all ranks does not belong to this run"):
        store.get("key")


def test_a_value_is_good_for_its_own_key_and_secret_only(shared):
    store = AuthenticatedStore(shared, SECRET, 1.0)
    store.set("device/0", "cpu:0")
    shared.set("device/1", shared.get("device/0"))
    assert not store.check(["device/1"])
    assert not AuthenticatedStore(shared, b"a guess", 1.0).check(["device/0"])


def test_a_rank_that_is_late_writes_over_what_others_have_written(shared, monkeypatch):
    monkeypatch.setattr(authenticated_store, "FOREIGN_SECONDS", 30.0)
    store = AuthenticatedStore(shared, SECRET, 30.0)
    shared.set("key", "forged")
    late = threading.Timer(0.1, lambda: AuthenticatedStore(shared, SECRET, 1.0).set("key", "own"))
    late.start()
    assert store.get("key") == b"own"
    late.join()


def test_what_nobody_has_written_is_waited_for_until_the_deadline(shared):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="key: not set, timed out"):
        AuthenticatedStore(shared, SECRET, 0.1).get("key")
    assert time.monotonic() - began >= 0.1


def connect_both(stores):
    """Two ranks in threads, each with its store; what each got from the other, or its error."""
    found = {}

    def connect(rank):
        try:
            group = ProcessGroup(stores[rank], rank, [Device("cpu:0"), Device("cpu:1")], LOOPBACK, 5.0, SECRET)
            found[rank] = group.all_gather(b"from %d" % rank)
        except PeerFailure as problem:
            found[rank] = str(problem)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_connect_through_it(shared):
    stores = [AuthenticatedStore(prefix_store("run", shared), SECRET, 5.0) for _ in range(2)]
    assert connect_both(stores) == {rank: [b"from 0", b"from 1"] for rank in range(2)}


@pytest.mark.parametrize("address", ["forged", ""])
def test_forged_addresses_never_reach_gloo_which_crashes_on_them(shared, address):
    class Overwritten(AuthenticatedStore):
        def set(self, key, value):
            super().set(key, value)
            shared.set(key, address)

    found = connect_both([Overwritten(shared, SECRET, 5.0) for _ in range(2)])
    for said in found.values():
        assert "into the store of all ranks does not belong to this run" in said
