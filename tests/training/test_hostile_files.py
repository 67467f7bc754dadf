"""Files in a run's folder are not trusted: pipes, links, endless and forged ones end in a sentence, at once."""

import os
import shutil

import numpy as np
import pytest

from lockstep.core.files import printable, read_regular
from lockstep.core.serialization import pack, unpack

STEPS = 10  # of the run below


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, to be copied."""
    import lockstep

    folder = tmp_path_factory.mktemp("hostile")
    how = {"data": "fashion-mnist-mini", "batch_size": 400, "num_epochs": 2, "lr": 0.1, "checkpoint_every": 5}
    result = lockstep.train(1, out=folder / "run", quiet=True, **how)
    assert result.steps == STEPS
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def resumed(lockstep, run, *more):
    settings = ("--data", "fashion-mnist-mini", "--batch-size", 400, "--epochs", 3, "--lr", 0.1, "--devices", 1)
    answer = lockstep("train", "--resume", "--out", run, *settings, *more)
    assert "Traceback" not in answer.err
    return answer


def replaced(run, how):
    path = run / "checkpoints" / f"step-{STEPS:06d}.safetensors"
    content = path.read_bytes()
    path.unlink()
    if how == "a pipe":
        os.mkfifo(path)
    elif how == "an endless device":
        path.symlink_to("/dev/zero")
    elif how == "a huge sparse file":
        path.touch()
        os.truncate(path, 30 << 30)
    else:
        (run / "elsewhere").write_bytes(content)
        path.symlink_to(run / "elsewhere")


@pytest.mark.parametrize("how", ["a pipe", "an endless device", "a huge sparse file", "a link"])
def test_what_is_no_regular_file_of_that_size_is_not_read(lockstep, run, how):
    replaced(run, how)
    answer = resumed(lockstep, run)
    assert answer.status == 0, answer.err
    assert f"step-{STEPS:06d}.safetensors cannot be read: " in answer.err
    assert "The one before it is used." in answer.err


def test_a_copy_of_an_old_checkpoint_under_a_higher_number_is_not_taken(lockstep, run):
    checkpoints = run / "checkpoints"
    shutil.copy(checkpoints / "step-000005.safetensors", checkpoints / "step-000099.safetensors")
    answer = resumed(lockstep, run, "--keep-checkpoints", 1)
    assert answer.status == 0, answer.err
    assert "step-000099.safetensors is damaged: it is a checkpoint of step 5 under another name" in answer.err
    assert f"continuing after step {STEPS}" in answer.err
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["step-000015.safetensors", "step-000099.safetensors"], "what was just written stays"


def forged(run, change):
    """The newest checkpoint with something else in it, and a SHA-256 that fits."""
    path = run / "checkpoints" / f"step-{STEPS:06d}.safetensors"
    tree = unpack(path.read_bytes())
    change(tree)
    path.write_bytes(pack(tree))


def set_notes(tree):
    tree["progress"]["notes"] = ["\x1b[2J\x1b]0;owned\x07"]


def set_nan(tree):
    next(iter(tree["weights"].values()))[...] = np.nan


def set_float_epoch(tree):
    tree["progress"]["epoch"] = float(tree["progress"]["epoch"])


def set_history(tree):
    tree["progress"]["history"][0]["epoch"] = "one"


def add_escape(tree):
    tree["weights"]["\x1b[31mred"] = np.zeros(1, np.float32)


def set_run(tree):
    tree["run"]["\x1b[31mmodel"] = "\x1b[31mred"


def set_state(tree):
    tree["states"] = {name: {"optimizer": [np.zeros((3, 3), np.float32)]} for name in tree["states"]}


@pytest.mark.parametrize("change", [set_notes, set_nan, set_float_epoch, set_history, add_escape, set_run, set_state])
def test_forged_values_end_in_a_sentence_without_escapes(lockstep, run, change):
    forged(run, change)
    answer = resumed(lockstep, run)
    assert "\x1b" not in answer.err
    assert "\x1b" not in answer.out
    if answer.status:
        assert answer.err.splitlines()[-1].startswith("lockstep: ")


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", f"checkpoints/step-{STEPS:06d}.safetensors"])
@pytest.mark.parametrize("how", ["a folder", "a pipe"])
def test_what_is_in_the_place_of_a_file_that_is_written_is_named(lockstep, run, name, how):
    (run / name).unlink()
    if how == "a folder":
        (run / name).mkdir()
        (run / name / "file").touch()
    else:
        os.mkfifo(run / name)
    answer = resumed(lockstep, run)
    if how == "a pipe" and name != "metrics.jsonl":
        assert answer.status == 0, "it is replaced"
        return
    assert answer.status == 1
    assert f"Remove what is in the place of a file: {run / name}" in answer.err
    assert f"The last one is {run / name}" not in answer.err


def test_a_folder_with_the_name_of_an_old_checkpoint_is_left_alone(lockstep, run):
    (run / "checkpoints" / "step-000000.safetensors").mkdir()
    answer = resumed(lockstep, run, "--keep-checkpoints", 1)
    assert answer.status == 0, answer.err
    assert (run / "checkpoints" / "step-000000.safetensors").is_dir()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "weights.safetensors"])
def test_links_in_a_runs_folder_are_not_followed(lockstep, run, tmp_path, name):
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    answer = resumed(lockstep, run)
    assert answer.status == 2
    assert f"has a symbolic link as {name}, which is not followed" in answer.err


def test_a_run_that_was_killed_before_its_first_file_was_complete_can_start_again(lockstep, run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / ".part-config.json").write_text('{"model":')
    answer = resumed(lockstep, other)
    assert answer.status == 0, answer.err
    assert not list(other.glob(".part-*"))


def test_an_archive_that_unpacks_to_a_thousand_times_its_size_is_refused(lockstep, tmp_path):
    arrays = {name: np.zeros(4, np.uint8) for name in ("y_train", "X_test", "y_test")}
    np.savez_compressed(tmp_path / "bomb.npz", X_train=np.zeros((1 << 29,), np.uint8), **arrays)
    answer = lockstep("train", "--data", tmp_path / "bomb.npz")
    assert answer.status == 2
    assert "X_train would unpack to 536,871,0" in answer.err


def test_only_what_is_expected_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="it has 11 bytes, and at most 10 are expected"):
        read_regular(tmp_path / "file", 10)
    assert read_regular(tmp_path / "file", 11) == b"x" * 11
    assert printable("a\x1b[31m\r\x00b\n") == "a\\x1b[31m\\r\\x00b\n"


def test_a_folder_that_is_removed_in_mid_run_gets_the_right_advice(tmp_path):
    import lockstep
    from lockstep.core.errors import RunError

    def remove(run):
        if run.step == 3:
            shutil.rmtree(tmp_path / "gone")

    with pytest.raises(RunError, match="The folder was removed or renamed: put it back"):
        lockstep.train(
            1, data="fashion-mnist-mini", batch_size=400, lr=0.1, out=tmp_path / "gone", on_step=remove, quiet=True
        )


def test_labels_that_unpack_to_much_are_refused_though_each_array_alone_is_small(lockstep, tmp_path):
    names = ("X_train", "y_train", "X_test", "y_test")
    np.savez_compressed(tmp_path / "bomb.npz", **{name: np.zeros(1 << 25, np.uint8) for name in names})
    answer = lockstep("train", "--data", tmp_path / "bomb.npz")
    assert answer.status == 2
    assert "would unpack to 33,554,560 bytes" in answer.err


def test_weights_that_no_such_model_has_are_not_read(lockstep, run):
    os.truncate(run / "weights.safetensors", 30 << 30)
    answer = lockstep("evaluate", run)
    assert answer.status == 2
    assert "it has 32,212,254,720 bytes, and at most " in answer.err


def test_a_config_that_names_a_path_that_no_file_can_have_is_refused(lockstep, run):
    for path in ("a\\u0000b", "\\ud800"):
        (run / "config.json").write_text(f'{{"data_dir": "{path}"}}')
        answer = resumed(lockstep, run)
        assert answer.status == 2
        assert "data dir must be a path" in answer.err
