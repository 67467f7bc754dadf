"""The examples: short enough to copy, run on small data."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def load(name):
    path = next(path for path in EXAMPLES if path.stem == name)
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_at_most_60_lines(path):
    assert len(path.read_text().splitlines()) <= 60


def test_all_of_them_are_run_here():
    names = ["alexnet_halves", "char_transformer", "clip", "gan", "gpt2_finetune", "larger_than_a_device", "lora"]
    more = ["own_cnn", "own_loop", "ray_train", "resnet18_cosine", "token_mean", "vit_mixup"]
    assert [path.stem for path in EXAMPLES] == [*names, *more]


def test_a_network_that_one_device_cannot_hold_fits_on_two():
    fits = load("larger_than_a_device").main(num_epochs=1)  # asserts that the weights are the same
    assert [way for way, does_fit in fits.items() if does_fit] == [
        way for way in fits if "stages" in way or "halves" in way
    ]


@pytest.mark.long
def test_two_halves_of_alexnet_have_the_weights_of_the_whole():
    assert len(load("alexnet_halves").main(num_epochs=1)) == 1


def test_a_loop_with_early_stopping_has_the_same_bits_on_any_devices():
    main = load("own_loop").main
    assert len({main(devices, max_epochs=3) for devices in (1, 2, 3)}) == 1


def test_two_trainers_of_a_gan_have_the_same_bits_on_any_devices():
    main = load("gan").main
    assert len({main(devices, num_steps=20) for devices in (1, 2, 3)}) == 1


@pytest.mark.parametrize("name", ["clip", "token_mean", "lora"])
def test_losses_of_a_whole_batch_and_thin_matrices_have_the_same_bits_on_any_devices(name):
    assert len(load(name).main(num_epochs=2)) == 1


def test_mixup_has_the_same_bits_on_any_devices():
    assert len(load("vit_mixup").main(num_epochs=1, num_samples=200)) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_hugging_face_has_the_same_bits_on_any_devices():
    pytest.importorskip("transformers", reason="transformers is not installed: nox -s models installs it")
    assert len(load("gpt2_finetune").main(num_epochs=2)) == 1


@pytest.mark.filterwarnings("ignore")
def test_workers_of_ray_train_have_the_hash_of_one_device():
    pytest.importorskip("ray.train.torch", reason="ray is not installed: nox -s ray installs it")
    assert len(set(load("ray_train").main().values())) == 1


@pytest.mark.long
def test_own_cnn_gives_one_hash(capsys):
    assert len(load("own_cnn").main(num_epochs=1)) == 1
    assert "1 hash for three numbers of devices" in capsys.readouterr().out


@pytest.mark.long
def test_resnet18_with_momentum_cosine_and_random_flips():
    arguments = ["--data", "fashion-mnist-mini", "--epochs", "1", "--width", "4", "--batch-size", "500"]
    main = load("resnet18_cosine").main
    results = [main([*arguments, "--devices", devices]) for devices in ("1", "cpu:0,cpu:1")]
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].steps == 4


@pytest.mark.long
def test_the_transformer_learns_a_text_and_continues_it(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    result = load("char_transformer").main(str(text), num_epochs=8, width=32)
    assert result.history[-1].train_loss < 0.6 * result.history[0].train_loss
    assert capsys.readouterr().out.splitlines()[-1].startswith("the quick brown fox ")
