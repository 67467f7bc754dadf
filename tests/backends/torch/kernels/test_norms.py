"""Our kernels leave alone what is being compiled or transformed; `test_cuda_kernels.py` has what they compute."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lockstep.backends.torch.kernels import batch_norm, hopper, layer_norm, replaced
from lockstep.backends.torch.stacked import StackedTensor


def layer_norm_fits():
    rows, weight, bias = (torch.empty(shape, device="cuda") for shape in ((300, 64), (64,), (64,)))
    return layer_norm.fits(rows, [64], weight, bias)


def batch_norm_fits():
    images = torch.empty(4, 8, 5, 5, device="cuda", memory_format=torch.channels_last)
    return batch_norm.fits(images, *(torch.empty(8, device="cuda") for _ in range(4)), True)


@pytest.mark.parametrize(
    ("module", "do_fit"),
    [(layer_norm, layer_norm_fits), (batch_norm, batch_norm_fits)],
    ids=["layer", "batch"],
)
def test_tensors_without_memory_are_left_to_the_compiler(monkeypatch, module, do_fit):
    with FakeTensorMode():
        assert not do_fit()
        monkeypatch.setattr(module, "has_memory", lambda tensor: True)
        assert do_fit()


@pytest.fixture
def patched(monkeypatch):
    """PyTorch's functions and operations as they are during a run on a GPU."""
    monkeypatch.setattr(replaced, "can_replace", lambda: True)
    with replaced.our_kernels():
        yield


def test_what_is_replaced_is_put_back(monkeypatch):
    def found():
        return torch.conv2d, F.conv2d, torch.batch_norm, torch.layer_norm

    before = found()
    monkeypatch.setattr(replaced, "can_replace", lambda: True)
    with replaced.our_kernels():
        assert not set(found()) & set(before)
        assert torch.conv2d is F.conv2d
    assert found() == before


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3, padding="same"), torch.nn.BatchNorm2d(4)
        self.rows = torch.nn.LayerNorm(8)

    def forward(self, X):
        return self.rows(self.norm(self.conv(X)))


def test_a_compiler_sees_pytorchs_own_functions_in_one_graph(patched):
    graphs = []

    def note(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    net, X = Net(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = net.eval()(X)
        assert torch.equal(torch.compile(net, backend=note, fullgraph=True)(X), expected)
    assert len(graphs) == 1


def test_layer_norm_of_several_shards_is_that_of_each(patched):
    stack, norm = torch.randn(3, 4, 8), torch.nn.LayerNorm(8)
    found = norm(StackedTensor(stack))
    (gradient,) = torch.autograd.grad(found.sum(), [norm.weight], StackedTensor(torch.ones(3)))
    for shard, rows in enumerate(stack):
        alone = norm(rows)
        assert torch.equal(found.stack[shard], alone)
        assert torch.equal(gradient.stack[shard], torch.autograd.grad(alone.sum(), [norm.weight])[0])


def test_what_has_memory():
    assert hopper.has_memory(torch.ones(1))
    assert hopper.has_memory(torch.nn.Parameter(torch.ones(1)))
    with FakeTensorMode():
        assert not hopper.has_memory(torch.ones(1))
    seen = []
    torch.func.vmap(lambda x: seen.append(hopper.has_memory(x)) or x)(torch.ones(2, 3))
    torch.func.grad(lambda x: seen.append(hopper.has_memory(x)) or x.sum())(torch.ones(2, 3))
    assert seen == [False, False]
