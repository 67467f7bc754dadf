"""A forked child does not delete what it inherits."""

import gc
import os

from lockstep.core.child_process import fork


class Joins:
    """Reports its deletion; real ones join a thread then, which a child does not have."""

    def __init__(self, pipe):
        self.pipe, self.myself = pipe, self  # a cycle, which only the garbage collector can delete

    def __del__(self):
        os.write(self.pipe, b"deleted")


def test_a_child_does_not_delete_objects_of_its_parent():
    read, write = os.pipe()
    inherited = Joins(write)
    child = fork()
    if child == 0:
        del inherited
        gc.collect()
        os.write(write, b"done")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"done"
    del inherited
    gc.collect()
    assert os.read(read, 100) == b"deleted"  # the parent still deletes it
    os.close(read)
    os.close(write)
