"""Optimizers of a flat vector against PyTorch's, and clipping."""

import numpy as np
import pytest
import torch

from lockstep.optim.optimizers import OPTIMIZERS, Adam, Sgd, clip_factor

CASES = {
    "sgd": (Sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (Sgd(0.1, 0.9, 0.01), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01)),
    "adam": (Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    "adam with decay": (Adam(0.01, 0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    "adamw": (Adam(0.01, 0.1, decoupled=True), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
}


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_pytorch(case):
    ours, make = CASES[case]
    random = np.random.RandomState(0)
    start = random.standard_normal(50).astype(np.float32)
    param = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer, flat, state = make([param]), start, ours.start(start)
    for step in range(1, 21):
        gradient = random.standard_normal(50).astype(np.float32)
        flat, state = ours(flat, gradient, state, step, factor=0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * ours.learning_rate
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(flat, param.detach().numpy(), rtol=0, atol=1e-6)
    assert flat.dtype == np.float32


def test_every_name_has_an_optimizer():
    assert OPTIMIZERS["sgd"](0.1, 0.9, 0.01) == Sgd(0.1, 0.9, 0.01)
    assert OPTIMIZERS["adam"](0.1, 0.0, 0.01) == Adam(0.1, 0.01)
    assert OPTIMIZERS["adamw"](0.1, 0.0, 0.01) == Adam(0.1, 0.01, decoupled=True)


def test_clipping_scales_only_gradients_whose_norm_is_too_large():
    norms = {"weight": 3.0, "bias": 4.0}
    assert clip_factor(norms, 1.0) == pytest.approx(0.2)
    assert clip_factor(norms, 10.0) == 1.0
    gradient = np.array([3.0, 4.0], np.float32) * np.float32(clip_factor(norms, 1.0))
    np.testing.assert_allclose(gradient, [0.6, 0.8], rtol=1e-6)
