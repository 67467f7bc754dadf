"""The settings of a run: checked in one place, and the same on the command line, in Python and in checkpoints."""

import dataclasses
import inspect
import json
import math
import pydoc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep as package
from lockstep.config import MAX_SEED, MAX_SHARDS, RunConfig, check_batch, check_ranks, settings_in
from lockstep.core.errors import ConfigError
from lockstep.core.settings import AGREED, IDENTITY, LOCAL, flag_of, help_of, option_of
from lockstep.training.checkpoint import check_same_run, identity_of


def test_the_defaults_are_those_of_the_text():
    config = RunConfig()
    assert (config.model, config.data, config.batch_size, config.learning_rate, config.num_epochs) == (
        "lenet",
        "fashion-mnist",
        256,
        0.2,
        10,
    )
    assert (config.num_shards, config.seed, config.backend, config.exchange) == (8, 0, "torch", "sharded")
    assert (config.devices, config.data_dir, config.out) == (None, None, None)


def test_equal_settings_are_equal_and_frozen():
    assert RunConfig(seed=1) == RunConfig(seed=1) != RunConfig(seed=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1


OUT_OF_RANGE = [
    ("batch_size", 0, "batch size must be at least 1, got 0 (--batch-size)."),
    ("batch_size", -5, "batch size must be at least 1, got -5 (--batch-size)."),
    ("learning_rate", 0.0, "learning rate must be more than 0, got 0.0 (--lr)."),
    ("learning_rate", -0.1, "learning rate must be more than 0, got -0.1 (--lr)."),
    ("learning_rate", math.nan, "learning rate must be more than 0, got nan (--lr)."),
    ("learning_rate", math.inf, "learning rate must be more than 0, got inf (--lr)."),
    ("num_epochs", 0, "epochs must be at least 1, got 0 (--epochs)."),
    ("momentum", -0.1, "momentum must be at least 0 and less than 1, got -0.1 (--momentum)."),
    ("momentum", 1, "momentum must be at least 0 and less than 1, got 1.0 (--momentum)."),
    ("weight_decay", -1, "weight decay must be at least 0, got -1.0 (--weight-decay)."),
    ("weight_decay", math.inf, "weight decay must be at least 0, got inf (--weight-decay)."),
    ("warmup", -1, "warmup must be at least 0, got -1 (--warmup)."),
    ("clip_norm", 0, "clip norm must be more than 0, got 0.0 (--clip-norm)."),
    ("ema", 1, "ema must be at least 0 and less than 1, got 1.0 (--ema)."),
    ("verify_every", -1, "verify every must be at least 0, got -1 (--verify-every)."),
    ("num_shards", 0, "shards must be at least 1 and at most 4096, got 0 (--shards)."),
    ("num_shards", 4097, "shards must be at least 1 and at most 4096, got 4097 (--shards)."),
    ("num_slices", 0, "slices must be at least 1 and at most 1024, got 0 (--slices)."),
    ("num_slices", 1025, "slices must be at least 1 and at most 1024, got 1025 (--slices)."),
    ("seed", -1, "seed must be at least 0 and at most 4294967295, got -1 (--seed)."),
    ("seed", 2**32, "seed must be at least 0 and at most 4294967295, got 4294967296 (--seed)."),
    ("bucket_mb", -1, "bucket mb must be at least 0, got -1.0 (--bucket-mb)."),
    ("workers", -1, "workers must be at least 0 and at most 256, got -1 (--workers)."),
    ("workers", 257, "workers must be at least 0 and at most 256, got 257 (--workers)."),
    ("checkpoint_every", -1, "checkpoint every must be at least 0, got -1 (--checkpoint-every)."),
    ("keep_checkpoints", 0, "keep checkpoints must be at least 1, got 0 (--keep-checkpoints)."),
    ("log_every", -1, "log every must be at least 0, got -1 (--log-every)."),
    ("check_every", -1, "check every must be at least 0, got -1 (--check-every)."),
    ("timeout", 0, "timeout must be more than 0 and less than 604800, got 0.0 (--timeout)."),
    ("timeout", 604800, "timeout must be more than 0 and less than 604800, got 604800.0 (--timeout)."),
    ("max_restarts", -1, "max restarts must be at least 0, got -1 (--max-restarts)."),
]


@pytest.mark.parametrize(("name", "value", "sentence"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_with_the_value_the_limits_and_the_option(name, value, sentence):
    with pytest.raises(ConfigError) as refused:
        RunConfig(**{name: value})
    assert str(refused.value) == sentence
    assert refused.value.exit_status == 2


def test_every_setting_with_limits_is_tested():
    assert {name for name, _, _ in OUT_OF_RANGE} == {each.name for each in settings_in() if each.metadata["limits"]}


@pytest.mark.parametrize(
    "each", [each for each in settings_in() if each.metadata["choices"]], ids=lambda each: each.name
)
def test_an_unknown_name_is_refused_with_the_choices_and_the_option(each):
    for choice in each.metadata["choices"]:
        assert getattr(RunConfig(**{each.name: choice}), each.name) == choice
    with pytest.raises(ConfigError) as refused:
        RunConfig(**{each.name: "nonesuch"})
    *first, last = sorted(each.metadata["choices"])
    words, allowed = each.name.replace("_", " "), f"{', '.join(first)} or {last}"
    assert str(refused.value) == f"{words} must be {allowed}, got 'nonesuch' ({flag_of(each)})."


def test_the_nearest_choice_is_suggested():
    with pytest.raises(ConfigError, match=r"got 'shraded' \(--exchange\)\. Did you mean 'sharded'\?$"):
        RunConfig(exchange="shraded")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 1),
        ("learning_rate", 5e-324),
        ("num_epochs", 1),
        ("momentum", 0),
        ("num_shards", 1),
        ("num_shards", MAX_SHARDS),
        ("seed", MAX_SEED),
        ("workers", 0),
        ("workers", 256),
        ("bucket_mb", 0),
        ("checkpoint_every", 0),
    ],
)
def test_the_limits_themselves_are_accepted(name, value):
    assert getattr(RunConfig(**{name: value}), name) == value


def test_an_integer_that_no_float_can_hold_is_compared():
    assert RunConfig(batch_size=10**400).batch_size == 10**400
    with pytest.raises(
        ConfigError, match=r"^seed must be at least 0 and at most 4294967295, got 10{400} \(--seed\)\.$"
    ):
        RunConfig(seed=10**400)


def test_a_replaced_record_is_checked_again():
    with pytest.raises(ConfigError):
        dataclasses.replace(RunConfig(), num_epochs=0)


@given(num_ranks=st.integers(1, 20), num_shards=st.integers(1, 20))
def test_there_are_at_most_as_many_devices_as_shards(num_ranks, num_shards):
    if num_ranks <= num_shards:
        check_ranks(num_ranks, num_shards)
    else:
        with pytest.raises(ConfigError, match=rf"Use at most {num_shards} devices, or {num_ranks} shards \(--shards;"):
            check_ranks(num_ranks, num_shards)


@pytest.mark.parametrize(("num_shards", "shards"), [(1, "1 shard:"), (2, "2 shards:")])
def test_too_many_devices_are_refused_with_two_remedies(num_shards, shards):
    with pytest.raises(ConfigError) as refused:
        check_ranks(3, num_shards)
    assert str(refused.value) == (
        f"3 devices cannot share {shards} some would never have work. "
        f"Use at most {num_shards} devices, or 3 shards (--shards; this changes the weights)."
    )


@given(batch_size=st.integers(1, 20), num_samples=st.integers(1, 20))
def test_a_batch_is_at_most_as_large_as_the_data(batch_size, num_samples):
    if batch_size <= num_samples:
        check_batch(batch_size, num_samples, "mine.npz")
    else:
        with pytest.raises(ConfigError) as refused:
            check_batch(batch_size, num_samples, "mine.npz")
        assert str(refused.value) == (
            f"A batch of {batch_size} samples is larger than mine.npz, which has {num_samples} for training. "
            f"Use at most {num_samples} (--batch-size)."
        )


INTEGERS = {"batch_size": "batch size", "num_epochs": "epochs", "num_shards": "shards", "seed": "seed"}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("wrong", [2.5, 2.0, "3", None, [3], np.float32(3)], ids=repr)
def test_what_is_no_integer_is_refused(name, wrong):
    with pytest.raises(ConfigError) as refused:
        RunConfig(**{name: wrong})
    option = f"--{INTEGERS[name].replace(' ', '-')}"
    assert str(refused.value) == f"{INTEGERS[name]} must be an integer, got {wrong!r} ({option})."


@pytest.mark.parametrize("wrong", ["fast", [0.2], 1j, 10**400], ids=["text", "list", "complex", "huge"])
def test_a_learning_rate_that_is_no_number_is_refused(wrong):
    with pytest.raises(ConfigError) as refused:
        RunConfig(learning_rate=wrong)
    assert str(refused.value) == f"learning rate must be a number, got {wrong!r} (--lr)."


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("compile", 1, "compile must be True or False, got 1 (--compile)."),
        ("capture", "no", "capture must be True or False, got 'no' (--capture)."),
        ("exchange", 3, "exchange must be a name, got 3 (--exchange)."),
        ("model", None, "model must be a name, got None (--model)."),
        ("out", 3, "out must be a path, got 3 (--out)."),
        ("data", "a\0b", r"data must be a name or the path of a .npz file, got 'a\x00b' (--data)."),
        ("schedule", len, "schedule must be a name, got <built-in function len>. For a function, use scheduler=."),
    ],
)
def test_other_types_are_refused(name, wrong, sentence):
    with pytest.raises(ConfigError) as refused:
        RunConfig(**{name: wrong})
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16])
def test_integers_of_numpy_become_plain_ones(name, kind):
    config = RunConfig(**{name: kind(3)})
    assert type(getattr(config, name)) is int
    assert config == RunConfig(**{name: 3})


@pytest.mark.parametrize("value", [1, np.float64(1), np.float32(1), np.int64(1)], ids=repr)
def test_the_learning_rate_becomes_a_plain_float(value):
    config = RunConfig(learning_rate=value)
    assert type(config.learning_rate) is float
    assert config.learning_rate == 1.0


def test_settings_from_numpy_are_recorded_as_json():
    config = RunConfig(batch_size=np.int64(8), learning_rate=np.float32(0.5), seed=np.uint32(7))
    recorded = json.loads(json.dumps(dataclasses.asdict(config)))
    assert (recorded["batch_size"], recorded["learning_rate"], recorded["seed"]) == (8, 0.5, 7)


def test_files_and_folders_of_data_mean_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(data="some/mine.npz", data_dir=Path("data"))
    assert config.data == str(tmp_path / "some" / "mine.npz")
    assert config.data_dir == tmp_path / "data"
    assert RunConfig(data_dir="data").data_dir == tmp_path / "data"
    monkeypatch.chdir("/")
    assert dataclasses.replace(config) == config


def test_a_named_data_set_and_the_folder_of_the_run_are_not_changed():
    config = RunConfig(data="fashion-mnist-mini", out=Path("runs/one"))
    assert (config.data, config.out) == ("fashion-mnist-mini", Path("runs/one"))


def test_slices_are_part_of_a_run_whose_layers_are_split():
    assert RunConfig().num_slices is None
    assert RunConfig(split="network=2").num_slices is None
    assert RunConfig(split="layers").num_slices == RunConfig(split="data=2,layers=2").num_slices == 8
    assert RunConfig(split="layers", num_slices=3).num_slices == 3


@pytest.mark.parametrize(
    "split", ["", "nonesuch", "data=0", "data=2,data=2", "network=two", "data,network=2", "layers="]
)
def test_a_split_that_cannot_be_read_is_refused(split):
    with pytest.raises(ConfigError, match=r"^--split .*--split data=2,network=2\.$") as refused:
        RunConfig(split=split)
    assert refused.value.exit_status == 2


# --- written once: the command line, Python and checkpoints have the same settings


def without_spaces(text):
    return "".join(text.split())


def test_train_help_has_every_setting_with_its_default_and_choices(lockstep):
    shown = without_spaces(lockstep("train", "--help").out.replace("│", " "))
    for each in settings_in():
        help_text = help_of(each)
        assert without_spaces(help_text) in shown
        assert all(choice in help_text for choice in each.metadata["choices"] or ())
        if each.default is None:
            assert "Default: " in help_text
        elif isinstance(each.default, bool):
            name = flag_of(each)[2:]
            assert f"--{name}--no-{name}" in shown
        else:
            assert f"{flag_of(each)}<{type(each.default).__name__}>" in shown
            assert f"{without_spaces(help_text)}[default:{each.default}]" in shown


def test_python_has_every_setting_with_its_default():
    parameters = inspect.signature(package.train).parameters
    page = pydoc.plain(pydoc.render_doc(package.train))
    for each in settings_in():
        assert parameters[option_of(each)].default == each.default
        assert f"{option_of(each)}: " in page


OTHER = {
    "devices": 3, "batch_size": 64, "learning_rate": 0.1, "num_epochs": 3, "model": "mlp", "data": "fashion-mnist-mini",
    "data_dir": "elsewhere", "loss": "mse", "optimizer": "adam", "momentum": 0.5, "weight_decay": 0.1,
    "schedule": "cosine", "warmup": 5, "clip_norm": 1.0, "loss_over": "batch", "ema": 0.5, "verify_every": 3,
    "batch_norm": "sync", "precision": "tf32", "num_shards": 4,
    "seed": 1, "backend": "numpy", "engine": "processes", "exchange": "tree", "bucket_mb": 1.0, "balance": "measured",
    "compile": True, "portable": True, "capture": False, "trace": True, "log_every": 2, "logger": "tensorboard",
    "workers": 1, "out": "runs/other",
    "checkpoint_every": 7,
    "keep_checkpoints": 1, "check_every": 7, "heal": True, "timeout": 5.0, "on_hang": "drop", "max_restarts": 0,
    "split": "network", "stages": "layer2", "pipeline": "gpipe", "num_slices": 4, "update": "sharded",
}  # fmt: skip


@pytest.mark.parametrize("each", settings_in(), ids=lambda each: each.name)
def test_a_run_resumes_with_other_settings_unless_they_are_part_of_its_identity(each):
    assert each.metadata["scope"] in (IDENTITY, AGREED, LOCAL)
    config, other = RunConfig(), RunConfig(**{each.name: OTHER[each.name]})
    task = SimpleNamespace(data_sha256="sha256", num_train=100)
    saved, wanted = identity_of(config, task), identity_of(other, task)
    if each.metadata["scope"] == IDENTITY:
        with pytest.raises(ConfigError) as refused:
            check_same_run(saved, wanted, other)
        assert repr(getattr(config, each.name)) in str(refused.value)
        assert repr(getattr(other, each.name)) in str(refused.value)
    else:
        check_same_run(saved, wanted, other)


def test_the_settings_that_decide_the_bits_are_these():
    assert [each.name for each in settings_in(IDENTITY)] == [
        "batch_size", "learning_rate", "model", "data", "loss", "loss_over", "optimizer", "momentum", "weight_decay",
        "schedule", "warmup", "clip_norm", "ema", "batch_norm", "precision", "num_shards", "seed", "backend",
        "num_slices", "compile", "portable",
    ]  # fmt: skip
