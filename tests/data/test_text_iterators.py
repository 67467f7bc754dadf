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
    assert all(map(np.array_equal, first, second))
    assert np.array_equal(np.concatenate(first), load_dataset("fashion-mnist-mini").y_test)


def test_tensors_are_those_of_the_framework_that_is_wanted():
    torch = pytest.importorskip("torch")
    X, y = next(iter(load_data_fashion_mnist(4, data="fashion-mnist-mini")[0]))
    assert (X.dtype, y.dtype, tuple(X.shape)) == (torch.float32, torch.int64, (4, 1, 28, 28))


@pytest.mark.parametrize("size", [0, -1, 2.5, "many"])
def test_a_wrong_batch_size_is_refused(size):
    with pytest.raises(ConfigError, match="batch size must be an integer of at least 1"):
        load_data_fashion_mnist(size, **MINI)
