"""A module as a whole: whether its numbers are finite."""

import pytest
import torch

from lockstep.replicas.module_state import are_finite


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_number_that_is_not_finite_is_found(number, dtype):
    tensor = torch.ones(3, 5, dtype=dtype)
    assert are_finite([torch.ones(2), tensor])
    tensor[2, 1] = number
    assert not are_finite([torch.ones(2), tensor])


def test_empty_tensors_and_integers_are_finite():
    assert are_finite([])
    assert are_finite([torch.empty(0, 3), torch.arange(4), torch.full((2,), 1e300, dtype=torch.float64)])
