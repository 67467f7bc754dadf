"""LeNet against the text's layers, with and without the crop, and the images that it refuses."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lockstep.core.errors import ConfigError
from lockstep.data import Dataset
from lockstep.models import MODELS
from lockstep.models.lenet import init_lenet, lenet
from lockstep.models.lenet_cropped import faster, lenet_cropped

BOTH = pytest.mark.parametrize("net", [lenet, lenet_cropped])
FRAMEWORKS = pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def as_published(X, params):
    """The text's layers, on the whole image."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, W2, b2)), 2)
    return F.relu(h2.flatten(1) @ W3 + b3) @ W4 + b4


def images(*shape):
    return np.random.RandomState(0).random_sample(shape).astype(np.float32)


def parameters(convert):
    return [convert(10 * array) for array in init_lenet(seed=0).values()]  # so that the scores are far from zero


@BOTH
def test_scores_and_gradients_are_those_of_the_text(net):
    X = torch.from_numpy(images(8, 1, 28, 28))
    found = []
    for each in (as_published, net):
        params = [param.requires_grad_() for param in parameters(torch.from_numpy)]
        scores = each(X, params)
        found.append([scores, *torch.autograd.grad(scores.logsumexp(1).sum(), params)])
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5 * float(expected.detach().abs().max()))


@FRAMEWORKS
def test_scores_with_and_without_the_crop_agree(convert):
    X, params = convert(images(8, 1, 28, 28)), parameters(convert)
    np.testing.assert_allclose(np.asarray(lenet_cropped(X, params)), np.asarray(lenet(X, params)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("net", [as_published, lenet, lenet_cropped])
def test_no_score_depends_on_the_cropped_pixels(net):
    X, params = torch.from_numpy(images(2, 1, 28, 28)), parameters(torch.from_numpy)
    edge = X.clone()
    edge[:, :, 26:], edge[:, :, :, 26:] = 7.0, -7.0
    assert torch.equal(net(edge, params), net(X, params))
    edge[:, :, 25, 25] += 1.0
    assert not torch.equal(net(edge, params), net(X, params))


@BOTH
@FRAMEWORKS
@pytest.mark.parametrize("shape", [(2, 1, 64, 64), (2, 3, 28, 28), (2, 1, 26, 26), (2, 26, 26), (2, 784)], ids=str)
def test_images_of_another_shape_are_refused_with_both_shapes(net, convert, shape):
    with pytest.raises(ConfigError) as refused:
        net(convert(images(*shape)), parameters(convert))
    assert f"lenet takes images of shape (samples, 1, 28, 28), and got {shape}. Resize them" in str(refused.value)


@BOTH
@FRAMEWORKS
def test_images_without_a_channel_dimension_have_the_same_scores(net, convert):
    X, params = images(3, 1, 28, 28), parameters(convert)
    np.testing.assert_array_equal(net(convert(X[:, 0]), params), net(convert(X), params))


@BOTH
@FRAMEWORKS
def test_bytes_are_refused(net, convert):
    with pytest.raises(ConfigError, match=r"takes images of floats from 0 to 1, and got .*uint8. Divide bytes by 255"):
        net(convert(np.zeros((2, 1, 28, 28), np.uint8)), parameters(convert))


@BOTH
def test_a_wrong_number_of_parameters_is_refused(net):
    with pytest.raises(ConfigError, match=r"lenet takes 8 parameters \(W1, b1, .*\), and got 7"):
        net(images(2, 1, 28, 28), parameters(np.asarray)[:7])


def test_the_text_functions_train_the_model_of_train():
    assert faster(lenet) is MODELS["lenet"].forward is lenet_cropped
    assert faster(as_published) is as_published


def labelled(*shape):
    return Dataset("mine", np.zeros((4, *shape), np.uint8), np.arange(4), np.zeros((2, *shape), np.uint8), np.arange(2))


def test_a_data_set_without_a_channel_dimension_gets_one():
    checked = MODELS["lenet"].checked(labelled(28, 28))
    assert (checked.X_train.shape, checked.X_test.shape) == ((4, 1, 28, 28), (2, 1, 28, 28))
    assert MODELS["lenet"].checked(Dataset("mine", np.zeros((4, 28, 28)), np.arange(4))).X_test is None
    whole = labelled(1, 28, 28)
    assert MODELS["lenet"].checked(whole) is whole


@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 28, 28), (26, 26)], ids=str)
def test_a_data_set_of_another_shape_is_refused_with_both_shapes(shape):
    with pytest.raises(ConfigError) as refused:
        MODELS["lenet"].checked(labelled(*shape))
    found = "x".join(map(str, shape))
    assert f"lenet takes samples of shape 1x28x28, and those of mine have {found}." in str(refused.value)


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        (np.arange(4.0), "lenet needs one label for each sample of mine: integers from 0 on."),
        (np.array([0, 1, 2, -1]), "lenet needs one label for each sample of mine: integers from 0 on."),
        (np.array([0, 1, 2, 10]), "lenet has 10 classes, and mine has labels up to 10."),
    ],
)
def test_labels_that_lenet_cannot_take_are_refused(y, sentence):
    with pytest.raises(ConfigError) as refused:
        MODELS["lenet"].checked(Dataset("mine", np.zeros((4, 1, 28, 28), np.uint8), y))
    assert str(refused.value) == sentence
