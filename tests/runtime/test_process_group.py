"""A rank's connections: what the others notice when it leaves."""

import os
import time

import pytest

from lockstep.core.child_process import fork
from lockstep.core.device import Device
from lockstep.core.errors import PeerFailure
from lockstep.runtime.process_group import ProcessGroup
from lockstep.runtime.store import LOOPBACK, join_store, serve_store

TWO = [Device("cpu:0"), Device("cpu:1")]


@pytest.mark.parametrize("how", ["closed", "after an error"])
def test_a_rank_that_closes_its_connections_is_noticed_at_once_though_it_lives_on(how):
    """Also while somebody holds the group, and the exception with all its frames."""
    store, port, _ = serve_store()
    child = fork()
    if child == 0:
        try:
            timeout = 5.0 if how == "after an error" else 60.0
            group = ProcessGroup(join_store(LOOPBACK, port, 30.0), 1, TWO, LOOPBACK, timeout)
            group.all_gather(b"here")
            kept = None
            if how == "closed":
                group.close()
            else:
                try:
                    group.all_gather(b"nobody answers this")
                except PeerFailure as failure:
                    kept = failure
            store_of_child = join_store(LOOPBACK, port, 60.0)
            store_of_child.set("left", "")
            store_of_child.get("over")
            assert group is not None
            assert (kept is not None and kept.timed_out) == (how == "after an error")
        finally:
            os._exit(0)
    try:
        group = ProcessGroup(join_store(LOOPBACK, port, 30.0), 0, TWO, LOOPBACK, 60.0)
        assert group.all_gather(b"first") == [b"first", b"here"]
        store.get("left")
        began = time.monotonic()
        with pytest.raises(PeerFailure) as failure:  # what was sent before it left may still arrive
            [group.all_gather(message) for message in (b"second", b"third")]
        assert time.monotonic() - began < 20
        assert not failure.value.timed_out
        with pytest.raises(PeerFailure, match="are closed"):
            group.all_gather(b"fourth")
    finally:
        store.set("over", "")
        os.waitpid(child, 0)


def test_long_messages_and_short_ones_arrive_whole():
    store, port, _ = serve_store()
    messages = [b"", b"x", bytes(range(256)) * 100, b"y" * 4088, b"z" * 4089]
    child = fork()
    if child == 0:
        try:
            group = ProcessGroup(join_store(LOOPBACK, port, 30.0), 1, TWO, LOOPBACK, 30.0)
            for message in messages:
                group.all_gather(message)
            group.broadcast(1, b"from one")
        finally:
            os._exit(0)
    group = ProcessGroup(join_store(LOOPBACK, port, 30.0), 0, TWO, LOOPBACK, 30.0)
    for message in messages:
        assert group.all_gather(b"mine") == [b"mine", message]
    assert group.broadcast(1, b"") == b"from one"
    os.waitpid(child, 0)
    group.close()
    del store


@pytest.mark.parametrize("secret", [b"the run's own", b"a guess", b""])
def test_who_does_not_have_the_secret_is_refused(secret):
    store, port, _ = serve_store()
    child = fork()
    if child == 0:
        try:
            group = ProcessGroup(join_store(LOOPBACK, port, 30.0), 1, TWO, LOOPBACK, 10.0, secret)
            group.all_gather(b"forged")
        finally:
            os._exit(0)
    try:
        store_of_parent = join_store(LOOPBACK, port, 30.0)
        if secret == b"the run's own":
            group = ProcessGroup(store_of_parent, 0, TWO, LOOPBACK, 10.0, secret)
            assert group.all_gather(b"own")[1] == b"forged"
        else:
            with pytest.raises(PeerFailure, match="in the place of rank 1 does not belong to this run"):
                ProcessGroup(store_of_parent, 0, TWO, LOOPBACK, 10.0, b"the run's own")
    finally:
        os.waitpid(child, 0)
    assert store is not None
