"""A capture without a GPU, which runs the step again where a CUDA graph would be replayed."""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only

from lockstep.backends.torch import TorchBackend
from lockstep.backends.torch.gradient_pieces import GradientPieces
from lockstep.core.tracing import traced
from lockstep.runtime.partial_sums import PartialSums


# a replay fills the memory of a capture: of gradients in pieces, and of sums, too
def sums_with(tensors, sums):
    (sums._tensors,) = tensors  # the same object, as a capture that runs once returns it
    return sums


register_pytree_node(
    GradientPieces,
    lambda found: (found.pieces, found),
    lambda pieces, found: GradientPieces(found._layout, list(pieces), found._device),
)
register_pytree_node(PartialSums, lambda sums: ([sums._tensors], sums), sums_with)


class FakeCapture:
    """Runs the captured step again, into the tensors of the capture; its host is as far ahead as with a GPU."""

    def __init__(self):
        self.num_captured, self.num_replayed, self.num_forks = 0, 0, 0
        self._thread = threading.local()  # ranks capture and replay on threads of their own

    @property
    def is_capturing(self):
        return getattr(self._thread, "is_capturing", False)

    @is_capturing.setter
    def is_capturing(self, value):
        self._thread.is_capturing = value

    @property
    def overwritten(self):
        """What is written in a capture, which only launches it, has to be as it was."""
        return getattr(self._thread, "overwritten", None)

    @overwritten.setter
    def overwritten(self, value):
        self._thread.overwritten = value

    @contextmanager
    def stream(self):
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as on the threads of ranks
        yield
        torch.set_num_threads(num_threads)

    @contextmanager
    def fork(self):
        self.num_forks += 1
        yield

    @staticmethod
    def side_stream(number, num_shards=1):
        return nullcontext()

    @staticmethod
    def serialize_streams():
        return False

    max_addends = 4

    @staticmethod
    def fused_add(brackets, vectors):
        return eval(brackets, {f"x{number}": vector for number, vector in enumerate(vectors)})

    stack = staticmethod(torch.stack)

    def capture(self, run, generators, warms_up=True):
        self.num_captured += 1
        if warms_up:
            run()
        generators()
        self.is_capturing, self.overwritten = True, []
        result = tree_map_only(torch.Tensor, torch.clone, run())
        for tensor, before in reversed(self.overwritten):
            tensor.copy_(before)
        self.is_capturing, self.overwritten = False, None

        def replay():
            self.num_replayed += 1
            self.is_capturing = True
            with traced(None):  # a replay runs no Python
                again = run()
            for kept, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(kept, torch.Tensor):
                    kept.copy_(new)
            self.is_capturing = False

        return replay, result

    def copy_to_host(self, numbers):
        found = numbers.tolist()

        class Later:
            weights = None

            @staticmethod
            def result():
                return found

        return Later()


@pytest.fixture
def capture(monkeypatch):
    found = FakeCapture()
    monkeypatch.setattr(TorchBackend, "graph_capture", lambda self, devices, rank=0: found)
    monkeypatch.setattr("lockstep.replicas.module_capture.is_capturing", lambda device: found.is_capturing)
    assign = TorchBackend.assign

    def assign_and_note(self, target, source):
        if found.overwritten is not None:
            found.overwritten.append((target, target.clone()))
        return assign(self, target, source)

    monkeypatch.setattr(TorchBackend, "assign", assign_and_note)
    return found


@pytest.fixture
def rank_capture(capture, monkeypatch):
    """The same, where every rank captures its own shards, as if it had a GPU of its own."""

    def graph_capture(self, devices, rank=0):
        return capture if len(devices) == 1 else None

    monkeypatch.setattr(TorchBackend, "graph_capture", graph_capture)
    return capture
