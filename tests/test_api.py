"""The public API: the text's functions, without the mistakes of its editions."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import lockstep
from lockstep.config import RunConfig
from lockstep.core.errors import ConfigError, RankError
from lockstep.core.layout import sha256_of
from lockstep.data import load_dataset
from lockstep.data.order import sample_order
from lockstep.training.run import run

TWO = ["cpu:0", "cpu:1"]


def start_params():
    return [torch.from_numpy(array) for array in lockstep.init_lenet(seed=0).values()]


def replicas_on(devices):
    return [lockstep.get_params(start_params(), device) for device in devices]


def test_the_public_names_are_these_and_all_of_them_exist():
    texts_own = {"try_gpu", "devices", "get_params", "allreduce", "split_batch", "train_batch", "train"}
    assert texts_own | {"evaluate_accuracy", "lenet"} <= set(lockstep.__all__)
    assert dir(lockstep) == sorted(lockstep.__all__)
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error_that_lists_the_names():
    with pytest.raises(AttributeError, match=r"no attribute 'trian'. It offers: .*train"):
        _ = lockstep.trian


def test_importing_lockstep_imports_no_framework():
    code = "import sys, lockstep; assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_try_gpu_gives_devices_that_torch_understands():
    devices = [lockstep.try_gpu(i) for i in range(2)]
    data = [torch.ones((1, 2), device=device) * (i + 1) for i, device in enumerate(devices)]
    lockstep.allreduce(data)
    assert [entry.tolist() for entry in data] == [[[3.0, 3.0]], [[3.0, 3.0]]]


# --- get_params: one edition's `.to(device)` is the tensor itself on the same device ---


def test_get_params_copies_also_on_the_same_device():
    params = start_params()
    first, second = lockstep.get_params(params, "cpu:0"), lockstep.get_params(params, "cpu:0")
    with torch.no_grad():
        first[0].zero_()
    assert bool((params[0] != 0).any())
    assert bool((second[0] == params[0]).all())
    assert all(param.requires_grad and param.is_leaf for param in first)


# --- parameters of a run in the text's functions: `result.params` are arrays of numpy ---


def test_params_of_a_run_fit_the_texts_functions_in_the_framework_of_the_run(few):
    result = lockstep.train(1, 8, num_epochs=1, data=str(few), quiet=True)
    assert all(isinstance(array, np.ndarray) for array in result.params.values())
    device_params = [lockstep.get_params(result.params, device) for device in TWO]
    X, y = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    assert lockstep.lenet(X, device_params[0]).shape == (20, 10)
    assert 0 <= lockstep.evaluate_accuracy(X, y, device_params, TWO) <= 1
    lockstep.train_batch(X, y, device_params, TWO, lr=0.2)
    assert hash_of(device_params[1]) != result.weights_sha256 == sha256_of(list(result.params.values()))


def test_params_of_a_run_keep_their_framework_when_they_are_pickled(few):
    result = lockstep.train(1, 8, num_epochs=1, data=str(few), quiet=True)
    copied = pickle.loads(pickle.dumps(result))
    assert isinstance(lockstep.get_params(copied.params, "cpu:0")[0], torch.Tensor)


def test_get_params_copies_into_the_framework_that_is_named():
    arrays = list(lockstep.init_lenet(seed=0).values())
    params = lockstep.get_params(arrays, "cpu:0", backend="torch")
    assert all(isinstance(param, torch.Tensor) and param.requires_grad for param in params)
    assert hash_of(params) == sha256_of(arrays)
    with torch.no_grad():
        params[0].zero_()
    assert (arrays[0] != 0).any()


def test_parameters_of_another_framework_are_refused_in_a_sentence_that_says_what_to_do():
    arrays = list(lockstep.init_lenet(seed=0).values())
    X, y = torch.rand(4, 1, 28, 28), torch.arange(4)
    sentence = (
        "X is in torch and the parameters are in numpy. Copy the parameters into torch: "
        'get_params(params, device, backend="torch").'
    )
    for attempt in (
        lambda: lockstep.lenet(X, arrays),
        lambda: lockstep.lenet(X, lockstep.init_lenet(seed=0)),
        lambda: lockstep.train_batch(X, y, [arrays], ["cpu:0"], lr=0.2),
        lambda: lockstep.evaluate_accuracy(X, y, [arrays], ["cpu:0"]),
    ):
        with pytest.raises(ConfigError) as refused:
            attempt()
        assert str(refused.value) == sentence
    with pytest.raises(ConfigError, match="A list is not a tensor of a known framework"):
        lockstep.lenet(X, [array.tolist() for array in arrays])


# --- allreduce: one edition rebinds list entries, so that device 1 never sees the sum ---


@pytest.mark.parametrize("exchange", ["gather", "sharded", "tree", "ring"])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_allreduce_changes_every_entry_in_place(exchange, k):
    data = [torch.full((3, 2), float(i + 1)) for i in range(k)]
    same_objects = list(data)
    returned = lockstep.allreduce(data, exchange)
    assert returned is data
    for entry, original in zip(data, same_objects, strict=True):
        assert entry is original
        assert original.tolist() == [[k * (k + 1) / 2] * 2] * 3


def test_allreduce_reaches_gradients_through_the_list():
    """The text calls it on [params.grad for each device]: the gradients themselves must change."""
    devices = replicas_on(TWO)
    for i, params in enumerate(devices):
        params[1].grad = torch.full_like(params[1], float(i + 1))
    lockstep.allreduce([params[1].grad for params in devices])
    assert all(bool((params[1].grad == 3).all()) for params in devices)


def test_allreduce_adds_in_the_tree_for_every_exchange_that_keeps_it():
    random = np.random.RandomState(0)
    parts = [torch.from_numpy(random.standard_normal(1000).astype(np.float32)) for _ in range(5)]
    tree = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    for exchange in ("gather", "sharded", "tree"):
        for entry in lockstep.allreduce([part.clone() for part in parts], exchange):
            assert torch.equal(entry, tree)


def test_allreduce_works_on_integers_and_scalars():
    assert lockstep.allreduce([torch.tensor(1), torch.tensor(2)]) == [3, 3]


def test_allreduce_refuses_what_cannot_be_added():
    with pytest.raises(ConfigError, match="one shape, and got"):
        lockstep.allreduce([torch.ones(2), torch.ones(3)])
    for wrong in ([], (torch.ones(2), torch.ones(2)), torch.ones(2, 3)):
        with pytest.raises(ConfigError, match="changes the entries of a list"):
            lockstep.allreduce(wrong)
    with pytest.raises(ConfigError, match="A NoneType is not a tensor"):
        lockstep.allreduce([torch.ones(2), None])


# --- split_batch: one edition drops the remainder, one refuses it, one leaves devices without a part ---


@pytest.mark.parametrize("num_samples", [1, 4, 5, 7, 256])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_split_batch_keeps_every_sample(num_samples, k):
    X, y = torch.arange(num_samples * 3).reshape(num_samples, 3), torch.arange(num_samples)
    X_parts, y_parts = lockstep.split_batch(X, y, [f"cpu:{i}" for i in range(k)])
    assert len(X_parts) == len(y_parts) == k
    assert torch.equal(torch.cat(X_parts), X)
    assert torch.equal(torch.cat(y_parts), y)
    sizes = [len(part) for part in y_parts]
    assert max(sizes) - min(sizes) <= 1


def test_split_batch_copies():
    X, y = torch.zeros(4, 2), torch.zeros(4)
    (X_part,), _ = lockstep.split_batch(X, y, ["cpu:0"])
    X_part.fill_(1)
    assert bool((X == 0).all())


def test_split_batch_refuses_wrong_arguments():
    with pytest.raises(ConfigError, match="3 samples and 2 labels"):
        lockstep.split_batch(torch.ones(3, 1), torch.ones(2), TWO)
    with pytest.raises(ConfigError, match="list of devices is empty"):
        lockstep.split_batch(torch.ones(3, 1), torch.ones(3), [])
    with pytest.raises(ConfigError, match="mixes CPU and GPU"):
        lockstep.split_batch(torch.ones(3, 1), torch.ones(3), ["cpu:0", "cuda:0"])


def test_the_same_name_twice_is_two_replicas_as_in_the_text_without_gpus():
    params = replicas_on(["cpu", "cpu"])
    X, y = torch.rand(10, 1, 28, 28), torch.arange(10)
    lockstep.train_batch(X, y, params, ["cpu", "cpu"], lr=0.2)
    assert hash_of(params[0]) == hash_of(params[1]) != hash_of(start_params())


def test_a_device_that_is_not_there_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="There is no cuda:99"):
        lockstep.get_params(start_params(), "cuda:99")


# --- train_batch and train ---


def after_batches(k, num_batches=3, batch_size=50, **settings):
    data = load_dataset("fashion-mnist-mini")
    devices = [f"cpu:{i}" for i in range(k)]
    device_params = replicas_on(devices)
    order = torch.from_numpy(sample_order(0, 0, len(data.X_train)))
    for number in range(num_batches):
        chosen = order[number * batch_size : (number + 1) * batch_size]
        X = torch.from_numpy(data.X_train)[chosen].float() / 255
        y = torch.from_numpy(data.y_train)[chosen]
        lockstep.train_batch(X, y, device_params, devices, lr=0.2, **settings)
    return device_params


def hash_of(params):
    return sha256_of([param.detach().numpy() if isinstance(param, torch.Tensor) else param for param in params])


def test_train_batch_gives_the_same_bits_on_every_device_and_for_every_k():
    (alone,) = after_batches(1)
    for k in (2, 3, 8):
        for replica in after_batches(k):
            assert hash_of(replica) == hash_of(alone)
    assert hash_of(alone) != hash_of(start_params())


def test_a_loop_over_train_batch_gives_the_bits_of_train(tmp_path):
    data = load_dataset("fashion-mnist-mini")
    path = tmp_path / "first.npz"
    np.savez(path, X_train=data.X_train[:100], y_train=data.y_train[:100], X_test=data.X_test, y_test=data.y_test)
    result = lockstep.train(2, batch_size=30, lr=0.2, num_epochs=1, data=str(path), quiet=True)

    device_params = replicas_on(["cpu:0"])
    order = torch.from_numpy(sample_order(0, 0, 100))
    for start in range(0, 100, 30):
        chosen = order[start : start + 30]
        X, y = torch.from_numpy(data.X_train)[chosen].float() / 255, torch.from_numpy(data.y_train)[chosen]
        lockstep.train_batch(X, y, device_params, ["cpu:0"], lr=0.2)
    assert hash_of(device_params[0]) == result.weights_sha256


def image_forms(images, to_tensor):
    """The same images as floats with a channel dimension, and in all other forms that `train` takes."""
    floats = images.astype(np.float32) / np.float32(255)
    return [to_tensor(form) for form in (floats, floats[:, 0], images, images[:, 0])]


@pytest.mark.parametrize("to_tensor", [torch.from_numpy, np.ascontiguousarray], ids=["torch", "numpy"])
def test_train_batch_and_evaluate_accuracy_take_bytes_and_images_without_a_channel_dimension(to_tensor):
    data, start = load_dataset("fashion-mnist-mini"), list(lockstep.init_lenet(seed=0).values())
    assert (data.X_train.dtype, data.X_train.shape[1:]) == (np.uint8, (1, 28, 28))
    y_train, y_test = to_tensor(data.y_train[:30]), to_tensor(data.y_test[:300])
    hashes = []
    for X in image_forms(data.X_train[:30], to_tensor):
        device_params = [lockstep.get_params([to_tensor(array) for array in start], device) for device in TWO]
        for _ in range(3):
            lockstep.train_batch(X, y_train, device_params, TWO, lr=0.2)
        hashes.append(hash_of(device_params[1]))
    test_forms = image_forms(data.X_test[:300], to_tensor)
    accuracies = [lockstep.evaluate_accuracy(X, y_test, device_params, TWO) for X in test_forms]
    assert len(set(hashes)) == 1
    assert hashes[0] != sha256_of(start)
    assert len(set(accuracies)) == 1
    assert 0 < accuracies[0] < 1


def test_train_batch_trains_any_function_of_samples_and_parameters():
    def one_layer(X, params):
        return X.reshape(len(X), -1) @ params[0]

    X, y = torch.rand(20, 4), torch.arange(20) % 3
    device_params = [lockstep.get_params([torch.zeros(4, 3)], device) for device in TWO]
    lockstep.train_batch(X, y, device_params, TWO, lr=1.0, net=one_layer)
    expected = torch.zeros(4, 3, requires_grad=True)
    torch.nn.functional.cross_entropy(X @ expected, y).backward()
    torch.testing.assert_close(device_params[1][0].detach(), -expected.grad, rtol=0, atol=1e-6)


def test_a_model_that_raises_is_named_with_rank_device_and_line():
    def broken(X, params):
        return X @ torch.ones(3, 3)

    X, y = torch.rand(20, 4), torch.arange(20) % 3
    device_params = [lockstep.get_params([torch.zeros(4, 3)], device) for device in TWO]
    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RankError, match=rf"rank 0 \(cpu:0\), during forward and backward: .*test_api.py:{line}"):
        lockstep.train_batch(X, y, device_params, TWO, lr=1.0, net=broken)


def test_train_batch_refuses_wrong_arguments():
    X, y = torch.rand(4, 1, 28, 28), torch.arange(4)
    with pytest.raises(ConfigError, match="one list for each of the 2 devices"):
        lockstep.train_batch(X, y, replicas_on(["cpu:0"]), TWO, lr=0.2)
    with pytest.raises(ConfigError, match="one list for each of the 2 devices"):
        lockstep.train_batch(X, y, [torch.ones(4), torch.ones(4)], TWO, lr=0.2)
    with pytest.raises(ConfigError, match=r"lenet takes 8 parameters \(W1, .*, and got 1.*net="):
        lockstep.train_batch(X, y, [[torch.ones(4)], [torch.ones(4)]], TWO, lr=0.2)
    with pytest.raises(ConfigError, match="device 1 have other shapes"):
        lockstep.train_batch(X, y, [[torch.ones(4)], [torch.ones(5)]], TWO, lr=0.2)
    for wrong in (2, "cpu:0"):
        with pytest.raises(ConfigError, match="is not a list of devices"):
            lockstep.split_batch(X, y, wrong)
    with pytest.raises(ConfigError, match="The batch is empty"):
        lockstep.train_batch(X[:0], y[:0], replicas_on(TWO), TWO, lr=0.2)
    with pytest.raises(ConfigError, match="2 devices cannot share 1 shard:"):
        lockstep.train_batch(X, y, replicas_on(TWO), TWO, lr=0.2, num_shards=1)
    with pytest.raises(ConfigError, match="learning rate must be more than 0, got nan"):
        lockstep.train_batch(X, y, replicas_on(TWO), TWO, lr=float("nan"))
    doubles = [[param.detach().double() for param in params] for params in replicas_on(TWO)]
    with pytest.raises(ConfigError, match=r"Parameter 0 is torch.float64. Lockstep trains float32"):
        lockstep.train_batch(X, y, doubles, TWO, lr=0.2)


def test_replicas_that_differ_are_refused_not_trained_as_two_models():
    X, y = torch.rand(4, 1, 28, 28), torch.arange(4)
    device_params = replicas_on(TWO)
    with torch.no_grad():
        device_params[1][7][3] += 1
    with pytest.raises(ConfigError, match="device 1 are not those for device 0"):
        lockstep.train_batch(X, y, device_params, TWO, lr=0.2)
    with pytest.raises(ConfigError, match="device 1 are not those for device 0"):
        lockstep.evaluate_accuracy(X, y, device_params, TWO)


def test_get_params_takes_a_modules_parameters_and_a_mapping():
    module = torch.nn.Linear(2, 3)
    from_generator = lockstep.get_params(module.parameters(), "cpu:0")
    from_mapping = lockstep.get_params(module.state_dict(), "cpu:0")
    assert [tuple(p.shape) for p in from_generator] == [tuple(p.shape) for p in from_mapping] == [(3, 2), (3,)]


def test_a_model_that_draws_random_numbers_is_refused_and_the_parameters_stay():
    def with_dropout(X, params):
        return torch.nn.functional.dropout(X.reshape(len(X), -1) @ params[0])

    X, y = torch.rand(20, 4), torch.arange(20) % 3
    device_params = [lockstep.get_params([torch.zeros(4, 3)], device) for device in TWO]
    with pytest.raises(lockstep.LockstepError, match="drew random numbers"):
        lockstep.train_batch(X, y, device_params, TWO, lr=1.0, net=with_dropout)
    assert all(bool((params[0] == 0).all()) for params in device_params)


def test_train_shows_progress_prints_the_texts_line_and_gives_a_result(tiny, tmp_path, capsys):
    out = tmp_path / "run"
    result = lockstep.train(2, batch_size=32, lr=0.1, num_epochs=2, data=str(tiny), out=out)
    printed = capsys.readouterr()
    assert printed.out == result.lines() + "\n"
    assert printed.out.startswith("test acc: ")
    assert "on [cpu:0, cpu:1]" in printed.out
    assert "epoch 2/2" in printed.err
    assert result.run == out
    assert [done.epoch for done in result.history] == [1, 2]
    assert sha256_of(list(result.params.values())) == result.weights_sha256


def test_train_takes_a_list_of_devices_or_num_gpus_but_not_both(tiny):
    by_number = lockstep.train(2, num_epochs=1, data=str(tiny), quiet=True)
    by_name = lockstep.train(devices=TWO, num_epochs=1, data=str(tiny), quiet=True)
    assert by_number.weights_sha256 == by_name.weights_sha256
    with pytest.raises(ConfigError, match="both num_gpus and devices"):
        lockstep.train(2, devices=TWO, data=str(tiny))


# --- evaluate_accuracy: the text's fourth exercise ---


def test_every_test_sample_is_counted_once_on_any_number_of_devices(few):
    """P2. The labels are the model's own predictions, except for a known number of wrong ones."""
    config = RunConfig(data=str(few), devices=1, num_epochs=3, batch_size=8)
    params = [torch.from_numpy(array) for array in run(config, quiet=True).params.values()]
    X = torch.rand(1037, 1, 28, 28)
    with torch.no_grad():
        y = lockstep.lenet(X, params).argmax(dim=1)
    wrong = [0, 255, 256, 700, 1036]
    y[wrong] = (y[wrong] + 1) % 10
    for k in (1, 2, 3, 5, 7):
        devices = [f"cpu:{i}" for i in range(k)]
        accuracy = lockstep.evaluate_accuracy(X, y, [lockstep.get_params(params, d) for d in devices], devices)
        assert accuracy == (1037 - len(wrong)) / 1037


def test_evaluate_accuracy_takes_the_texts_iterator_and_counts_every_sample_once():
    _, test_iter = lockstep.load_data_fashion_mnist(128, data="fashion-mnist-mini")
    params = [40 * param for param in start_params()]
    X, y = (torch.cat(parts) for parts in zip(*test_iter, strict=True))
    assert len(X) == 500  # the last batch has other samples than the others
    expected = lockstep.evaluate_accuracy(X, y, [lockstep.get_params(params, "cpu:0")], ["cpu:0"])
    assert expected == (lockstep.lenet(X, params).argmax(1) == y).sum().item() / 500
    for k in (1, 2, 3):
        devices = [f"cpu:{i}" for i in range(k)]
        device_params = [lockstep.get_params(params, device) for device in devices]
        assert lockstep.evaluate_accuracy(test_iter, device_params, devices) == expected
        assert lockstep.evaluate_accuracy(iter(test_iter), device_params=device_params, devices=devices) == expected
        assert lockstep.evaluate_accuracy(X=X, y=y, device_params=device_params, devices=devices) == expected


def test_evaluate_accuracy_refuses_wrong_arguments():
    X, y, replicas = torch.rand(4, 1, 28, 28), torch.arange(4), replicas_on(TWO)
    with pytest.raises(ConfigError, match=r"samples without labels. Call evaluate_accuracy\(X, y, device_params"):
        lockstep.evaluate_accuracy(X, replicas, TWO)
    with pytest.raises(ConfigError, match="iterator yields no batches"):
        lockstep.evaluate_accuracy([], replicas, TWO)
    with pytest.raises(ConfigError, match=r"iterator yields Tensor, not pairs"):
        lockstep.evaluate_accuracy([X], replicas, TWO)
    with pytest.raises(ConfigError, match="must be lists, one entry for each device"):
        lockstep.evaluate_accuracy([(X, y)], replicas)


def test_a_net_need_not_be_hashable():
    class Net:
        __hash__ = None

        def __call__(self, X, params):
            return X.flatten(1) @ params[0]

    weights = [lockstep.get_params([torch.zeros(4, 3)], device) for device in TWO]
    lockstep.train_batch(torch.ones(6, 4), torch.arange(6) % 3, weights, TWO, lr=0.1, net=Net())
    assert torch.equal(weights[0][0], weights[1][0])


def test_the_frameworks_own_exchange_needs_processes():
    with pytest.raises(ConfigError, match="'native' is the framework's own, between processes"):
        lockstep.allreduce([np.ones(2), np.ones(2)], "native")


def test_one_device_is_no_list():
    params = [[np.zeros(2, np.float32)]]
    with pytest.raises(ConfigError, match="'cpu:0' is one device, and a list is needed"):
        lockstep.evaluate_accuracy([(np.ones((2, 2), np.float32), np.zeros(2))], params, "cpu:0")
