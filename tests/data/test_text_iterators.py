"""The text's iterators: every image once, in another order in every pass."""

import numpy as np
import pytest

from lockstep import load_data_fashion_mnist
from lockstep.core.errors import ConfigError
from lockstep.data import load_dataset
from lockstep.data.order import sample_order

MINI = {"data": "fashion-mnist-mini", "backend": "numpy"}


def test_every_pass_has_all_images_in_the_order_of_a_run():
    data = load_dataset("fashion-mnist-mini")
    train_iter, _ = load_data_fashion_mnist(300, **MINI, seed=3)
    for epoch in range(2):
        batches = list(train_iter)
        assert [len(y) for _, y in batches] == [300] * 6 + [200]
        order = sample_order(3, epoch, 2000)
        assert np.concatenate([y for _, y in batches]).tolist() == data.y_train[order].tolist()
        X = np.concatenate([X for X, _ in batches])
        assert X.dtype == np.float32
        assert np.array_equal(X, data.X_train[order].astype(np.float32) / 255)
    assert len(train_iter) == 7


def test_the_test_images_keep_their_order():
    _, test_iter = load_data_fashion_mnist(200, **MINI)
    first, second = ([y for _, y in test_iter] for _ in range(2))
    assert all(np.array_equal(*both) for both in zip(first, second, strict=True))
    assert np.array_equal(np.concatenate(first), load_dataset("fashion-mnist-mini").y_test)


def test_tensors_are_those_of_the_framework_that_is_wanted():
    torch = pytest.importorskip("torch")
    X, y = next(iter(load_data_fashion_mnist(4, data="fashion-mnist-mini")[0]))
    assert (X.dtype, y.dtype, tuple(X.shape)) == (torch.float32, torch.int64, (4, 1, 28, 28))


def test_an_iterator_shows_how_many_batches_and_samples_it_has():
    train_iter, test_iter = load_data_fashion_mnist(300, **MINI)
    assert repr(train_iter) == "<7 batches of up to 300 of 2,000 samples (X, y)>"
    assert repr(test_iter) == "<2 batches of up to 300 of 500 samples (X, y)>"
    assert repr(load_data_fashion_mnist(300, (96, 64), **MINI)[0]).endswith("(X, y), resized to 96x64>")


@pytest.mark.parametrize("resize", [96, (40, 56), 28, 14, (10, 64)])
def test_images_are_resized_as_by_bilinear_interpolation(resize):
    torch = pytest.importorskip("torch")
    size = (resize, resize) if isinstance(resize, int) else resize
    plain, _ = next(iter(load_data_fashion_mnist(4, **MINI)[1]))
    found, _ = next(iter(load_data_fashion_mnist(4, resize, **MINI)[1]))
    expected = torch.nn.functional.interpolate(torch.from_numpy(plain), size, mode="bilinear", antialias=True)
    assert found.shape == (4, 1, *size)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-6)


@pytest.mark.parametrize("resize", [0, -3, 2.5, "96", (96,), (96, 0)])
def test_a_size_that_cannot_be_is_refused(resize):
    with pytest.raises(ConfigError, match=r"resize must be a number of pixels or \(height, width\), got"):
        load_data_fashion_mnist(4, resize, **MINI)


@pytest.mark.parametrize("size", [0, -1, 2.5, "many"])
def test_a_wrong_batch_size_is_refused(size):
    with pytest.raises(ConfigError, match="batch size must be an integer of at least 1"):
        load_data_fashion_mnist(size, **MINI)
