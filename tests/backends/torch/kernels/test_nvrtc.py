"""Where our kernels are compiled and launched: on the GPU of the tensors, whichever is the thread's current one."""

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.backends.torch.kernels import nvrtc
from lockstep.backends.torch.kernels.hopper import on_its_gpu


@pytest.fixture
def current(monkeypatch):
    """The GPUs that are current, the innermost last; what PyTorch would do on them is described, and not done."""
    entered = [torch.device("cuda:0")]

    @contextmanager
    def device(gpu):  # a device, or its number, -1 for none
        number = gpu if isinstance(gpu, int) else gpu.index
        entered.append(torch.device("cuda", number) if number >= 0 else entered[-1])
        yield
        entered.pop()

    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None)  # of a real GPU
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1].index)
    monkeypatch.setattr(nvrtc._THREAD, "devices", set(), raising=False)
    with FakeTensorMode():
        yield entered


def test_a_kernel_is_compiled_and_launched_on_the_gpu_of_its_tensors(current, monkeypatch):
    def compile_here(source, name):
        compiled_on = current[-1]

        def kernel(grid, block, args, shared_mem):
            assert current[-1] == compiled_on == args[0].device, "another GPU's memory"
            launched.append((grid, block, shared_mem))

        return kernel

    launched = []
    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile_here, raising=False)
    for name in ("cuda:0", "cuda:1", "cuda:0"):
        out = torch.empty(1000, device=name)
        nvrtc.add_gradients("(x0 + x1)", out, [(torch.empty_like(out),), (torch.empty_like(out),)])
    assert launched == [((1, 1, 1), (256, 1, 1), 0)] * 3
    assert current == [torch.device("cuda:0")], "the caller's GPU is current again"


def test_a_thread_has_a_context_for_each_gpu_before_the_first_kernel(current, monkeypatch):
    made, launched_on = [], []
    monkeypatch.setattr(torch, "zeros", lambda size, device: made.append(device))
    for name in ("cuda:1", "cuda:1", "cuda:0"):
        gpu = torch.device(name)
        nvrtc.launch(lambda **given: launched_on.append(current[-1]), 1, [torch.empty(1, device=gpu)])
        assert made[-1] == gpu
    assert made == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert launched_on == [torch.device(name) for name in ("cuda:1", "cuda:1", "cuda:0")]


def test_what_triton_launches_is_launched_on_the_gpu_of_the_first_tensor(current):
    @on_its_gpu
    def launch(context, tensor, number):
        return current[-1], number

    assert launch(None, torch.empty(1, device="cuda:1"), 3) == (torch.device("cuda:1"), 3)
    assert launch(None, torch.empty(1), 3) == (torch.device("cuda:0"), 3), "a tensor of the CPU chooses no GPU"


def test_a_gpu_that_is_full_at_the_moment_does_not_rule_kernels_out(current, monkeypatch):
    def fail(source, name):
        raise RuntimeError(problems.pop())

    problems = ["no such function", "CUDA error: out of memory"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", fail, raising=False)
    nvrtc.can_compile_kernels.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            nvrtc.can_compile_kernels()
        assert not nvrtc.can_compile_kernels(), "which is another reason"
        assert problems == []
    finally:
        nvrtc.can_compile_kernels.cache_clear()
