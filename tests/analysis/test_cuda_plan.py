"""Plans measured on a GPU: every number of shards has a figure, eager and captured, and no split is missing."""

import math

import pytest
import torch

import lockstep

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible on this machine"),
]
SHARDS = (1, 2, 4, 8, 16)
HOW = {"data": "fashion-mnist-mini", "devices": "cuda:0", "quiet": True, "seconds": 2.0}


def check_figures(plan):
    for row in plan.rows:
        assert 0 < row.predicted_ms < math.inf, row
        assert row.memory_bytes > 0, row
    assert plan.recommended in plan.rows


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("model", ["lenet", "lenet-bn"])
def test_one_gpu_has_a_figure_for_every_number_of_shards(model, capture):
    plan = lockstep.plan(1, model=model, capture=capture, check=True, **HOW)
    assert [row.configuration.num_shards for row in plan.rows] == list(SHARDS)
    check_figures(plan)
    assert [number for number, _ in plan.profile.whole_steps.points] == list(SHARDS)
    assert all(row.measured_ms > 0 for row in plan.rows)


@pytest.mark.parametrize("model", ["lenet", "lenet-bn"])
def test_every_split_is_measured_on_one_gpu(model):
    """Layers and slices are measured with the GPU listed several times."""
    plan = lockstep.plan(2, model=model, **HOW)
    assert plan.profile.problems == {}
    assert {row.split for row in plan.rows if row.configuration.num_devices == 2} == {"data", "network", "layers"}
    check_figures(plan)


def test_shards_that_do_not_fit_are_left_out():
    """With three gigabytes of memory, a batch in one shard does not fit; in sixteen shards it does."""
    wide = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 65_536), torch.nn.Linear(65_536, 10))
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (3 << 30)) / total)
    try:
        how = {**HOW, "data": (torch.rand(8192, 784), torch.zeros(8192, dtype=torch.int64))}
        plan = lockstep.plan(1, model=wide, batch_size=8192, shards="16,1", capture=False, **how)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert [size for size, _ in plan.profile.whole.points] == [512]
    assert [number for number, _ in plan.profile.whole_steps.points] == [16]
    check_figures(plan)
