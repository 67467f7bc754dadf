"""LeNet as it is computed here, against the text's layers one after the other."""

import torch
from torch.nn import functional as F

from lockstep.models import MODELS
from lockstep.models.lenet import init_lenet, lenet


def as_published(X, params):
    """The text's layers, on the whole image."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, W2, b2)), 2)
    return F.relu(h2.flatten(1) @ W3 + b3) @ W4 + b4


def test_scores_and_gradients_are_those_of_the_text():
    X = torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    found = []
    for net in (as_published, lenet):
        params = [torch.from_numpy(10 * array).requires_grad_() for array in init_lenet(seed=0).values()]
        scores = net(X, params)
        found.append([scores, *torch.autograd.grad(scores.logsumexp(1).sum(), params)])
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5 * float(expected.detach().abs().max()))


def test_the_last_rows_and_columns_of_an_image_change_no_score_of_the_text():
    X = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    params = [torch.from_numpy(10 * array) for array in init_lenet(seed=0).values()]
    edge = X.clone()
    edge[:, :, 26:], edge[:, :, :, 26:] = 7.0, -7.0
    assert torch.equal(as_published(edge, params), as_published(X, params))
    edge[:, :, 25, 25] += 1.0
    assert not torch.equal(as_published(edge, params), as_published(X, params))


def test_it_asks_for_whole_images():
    assert MODELS["lenet"].sample_shape == (1, 28, 28)
