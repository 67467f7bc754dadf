"""A run's folder: what is in it and when; and a folder that is not trusted, read without harm."""

import dataclasses
import errno
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from lockstep import __version__
from lockstep.core.errors import ConfigError, RunError
from lockstep.report import plots, runlog
from lockstep.report.events import EpochDone, RunDone, StepDone
from lockstep.report.runlog import RunLog, check_folder, new_folder, read_run, read_weights, to_json, write_whole


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def lines_in(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- writing


def test_a_run_writes_its_five_files(tmp_path, make_started, make_result):
    folder, result = tmp_path / "runs" / "one", make_result()
    log = RunLog(folder)
    assert not folder.parent.exists()
    log.claim()
    log.write(make_started())
    assert names_in(folder) == ["config.json", "metrics.jsonl"]
    log.write(StepDone(1, 1, 256, loss=2.3, learning_rate=0.2, seconds=0.5))
    for epoch in result.history:
        log.write(epoch)
    assert names_in(folder) == ["config.json", "metrics.jsonl"]
    log.write(RunDone(result))
    assert names_in(folder) == ["config.json", "curve.png", "metrics.jsonl", "result.json", "weights.safetensors"]

    assert json.loads((folder / "config.json").read_text()) == {
        **make_started().config,
        "data_sha256": "cd" * 32,
        "made_with": {},
        "versions": {"lockstep": __version__, "python": platform.python_version()},
    }
    lines = lines_in(folder)
    assert [line.pop("event") for line in lines] == ["started", "step", "epoch", "epoch", "done"]
    assert all(abs(line.pop("time") - time.time()) < 60 for line in lines)
    assert lines[0] == dataclasses.asdict(make_started())
    assert lines[1] == {
        "epoch": 1,
        "step": 1,
        "loss": 2.3,
        "learning_rate": 0.2,
        "samples_per_second": 512.0,
    }
    assert lines[2] == {"epoch": 1, "seconds": 12.0, "train_loss": 1.5, "test_accuracy": 0.7, "metrics": {}}
    assert lines[4]["weights_sha256"] == result.weights_sha256
    assert json.loads((folder / "result.json").read_text()) == result.summary()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    weights = load((folder / "weights.safetensors").read_bytes())
    assert {name: array.tobytes() for name, array in weights.items()} == {
        name: array.tobytes() for name, array in result.params.items()
    }


def test_an_empty_folder_may_be_used(tmp_path, make_started):
    RunLog(tmp_path).write(make_started())
    assert names_in(tmp_path) == ["config.json", "metrics.jsonl"]


def test_a_folder_that_is_not_empty_is_refused_and_not_changed(tmp_path):
    (tmp_path / ".hidden").write_text("mine")
    with pytest.raises(ConfigError) as refused:
        RunLog(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path} is not empty: a run is never written over. Resume the run in it (--resume), remove it, or choose "
        "another --out."
    )
    assert names_in(tmp_path) == [".hidden"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError) as refused:
        RunLog(tmp_path / "file")
    assert str(refused.value) == f"{tmp_path / 'file'} is a file. Choose another --out."


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / "one" / "two"
    with pytest.raises(ConfigError) as refused:
        check_folder(folder)
    assert str(refused.value) == f"{folder} cannot be made: {tmp_path / 'file'} is a file. Choose another --out."


def test_a_folder_with_an_impossible_name_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        check_folder(tmp_path / ("a" * 300))
    assert str(refused.value) == f"{tmp_path / ('a' * 300)} cannot be used: File name too long. Choose another --out."


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_is_not_writable_is_refused(tmp_path, monkeypatch, exists):
    folder = tmp_path if exists else tmp_path / "one" / "two"
    asked = []
    monkeypatch.setattr(runlog.os, "access", lambda path, mode: asked.append(path))
    with pytest.raises(ConfigError) as refused:
        check_folder(folder)
    assert str(refused.value) == f"{folder} cannot be used: {tmp_path} is not writable. Choose another --out."
    assert asked == [tmp_path]


def test_a_folder_that_may_not_be_listed_is_refused(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(ConfigError) as refused:
        RunLog(tmp_path)
    assert str(refused.value) == f"{tmp_path} cannot be used: Permission denied. Choose another --out."
    assert isinstance(refused.value.__cause__, PermissionError)


@pytest.mark.skipif(os.geteuid() == 0, reason="Root may read and write everything.")
@pytest.mark.parametrize(
    ("mode", "below", "problem"),
    [(0o300, "", "Permission denied"), (0o500, "", "{} is not writable"), (0o500, "a/b", "{} is not writable")],
)
def test_a_folder_without_permission_is_refused(tmp_path, mode, below, problem):
    closed = tmp_path / "closed"
    closed.mkdir(mode=mode)
    with pytest.raises(ConfigError) as refused:
        RunLog(closed / below)
    assert str(refused.value) == (f"{closed / below} cannot be used: {problem.format(closed)}. Choose another --out.")


def test_a_resumed_run_removes_incomplete_files_and_completes_a_cut_line(tmp_path, make_started):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"event": "started"}\n{"event": "epo')
    (tmp_path / "checkpoints").mkdir()
    for name in (".part-weights.safetensors", "checkpoints/.part-step-000007.safetensors"):
        (tmp_path / name).write_text("half")
    RunLog(tmp_path, is_resumed=True).write(dataclasses.replace(make_started(), step=8))
    assert names_in(tmp_path) == ["checkpoints", "config.json", "metrics.jsonl"]
    assert names_in(tmp_path / "checkpoints") == []
    first, cut, resumed = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (first, cut) == ('{"event": "started"}', '{"event": "epo')
    assert json.loads(resumed)["event"] == "resumed"


def test_only_a_run_is_resumed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError) as refused:
        RunLog(tmp_path, is_resumed=True)
    assert str(refused.value) == f"{tmp_path} is not a run: it has no config.json. Choose another --out."


def test_of_two_runs_in_one_folder_the_second_is_refused_and_writes_nothing(tmp_path, make_started):
    folder = tmp_path / "run"
    first, second, third = RunLog(folder), RunLog(folder), RunLog(folder)
    first.claim()
    first.write(make_started())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError) as refused:
        second.claim()
    assert str(refused.value) == f"Another run is under way in {folder}. Choose another --out."
    first.close()
    with pytest.raises(ConfigError) as refused:
        third.claim()
    assert str(refused.value) == f"Another run has just started in {folder}. Choose another --out."
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    first.write(EpochDone(1, 1.0, 1.0, 0.5))
    assert [line["event"] for line in lines_in(folder)] == ["started", "epoch"]


def test_of_many_runs_that_start_at_the_same_moment_one_gets_the_folder(tmp_path, make_started):
    logs = [RunLog(tmp_path / "run") for _ in range(8)]
    barrier, outcomes = threading.Barrier(len(logs), timeout=20), []

    def start(log):
        barrier.wait()
        try:
            log.claim()
            log.write(make_started())
            outcomes.append("started")
        except ConfigError:
            outcomes.append("refused")

    threads = [threading.Thread(target=start, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 7 + ["started"]
    assert [line["event"] for line in lines_in(tmp_path / "run")] == ["started"]


def test_a_new_folder_that_stays_empty_is_removed(tmp_path):
    log = RunLog(tmp_path / "run")
    log.claim()
    assert (tmp_path / "run").is_dir()
    log.close()
    log.close()  # twice does no harm
    assert names_in(tmp_path) == []
    existing = RunLog(tmp_path)
    existing.claim()
    existing.close()
    assert tmp_path.is_dir()


def test_a_new_folder_is_named_after_the_run_and_the_time_and_never_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runlog.time, "strftime", lambda form: f"time({form})")
    first = Path("runs/lenet-time(%Y%m%d-%H%M%S)")
    with new_folder("lenet") as one, new_folder("lenet") as other:  # two runs that start in the same second
        assert (one, other) == (first, Path(f"{first}-2"))
        assert one.is_dir()
        assert other.is_dir()
    assert names_in(tmp_path) == []
    first.mkdir(parents=True)
    Path(f"{first}-2").write_text("a file is in the way as well")
    with new_folder("lenet") as folder:
        (folder / "kept").touch()
    assert names_in(tmp_path / "runs" / f"{first.name}-3") == ["kept"]


TERMINATED = """
import os, signal
from lockstep.report.runlog import new_folder

with new_folder("lenet") as folder:
    assert folder.is_dir()
    os.kill(os.getpid(), signal.SIGTERM)  # before anything is written
"""


def test_a_program_that_is_terminated_before_it_writes_leaves_no_folder(tmp_path):
    done = subprocess.run([sys.executable, "-c", TERMINATED], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert names_in(tmp_path) == []


def test_under_torchrun_one_rank_makes_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runlog, "prints_result", lambda: False)
    with new_folder("lenet") as folder:
        assert folder.parent == Path("runs")
        assert names_in(tmp_path) == []


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_a_run_that_stops_writes_its_curve_and_weights(tmp_path, make_started, make_stopped, num_epochs):
    log, stopped = RunLog(tmp_path), make_stopped(num_epochs)
    for event in (make_started(), *stopped.history, stopped):
        log.write(event)
    assert names_in(tmp_path) == ["config.json", "curve.png", "metrics.jsonl", "weights.safetensors"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    lines = lines_in(tmp_path)
    assert [line["event"] for line in lines] == ["started", *["epoch"] * num_epochs, "stopped"]
    assert lines[-1] == {
        "event": "stopped",
        "time": lines[-1]["time"],
        "epoch": num_epochs + 1,
        "step": 8 * num_epochs + 3,
        "reason": "the loss is NaN or infinite",
    }
    weights = read_weights(tmp_path, 1 << 20)
    assert {name: array.tobytes() for name, array in weights.items()} == {
        name: array.tobytes() for name, array in stopped.weights.items()
    }


@pytest.mark.parametrize(("num_epochs", "is_kept"), [(0, True), (1, False)])
def test_an_average_of_other_weights_than_those_beside_it_is_removed(
    tmp_path, make_started, make_stopped, num_epochs, is_kept
):
    log, average = RunLog(tmp_path), tmp_path / "ema.safetensors"
    log.write(make_started())
    average.write_bytes(b"of the weights before")
    log.write(make_stopped(num_epochs))  # with new weights, where an epoch was finished
    assert average.exists() is is_kept


def test_a_run_that_stops_in_its_first_epoch_has_no_weights(tmp_path, make_started, make_stopped):
    log = RunLog(tmp_path)
    log.write(make_started())
    log.write(make_stopped(0))
    assert names_in(tmp_path) == ["config.json", "metrics.jsonl"]
    assert [line["event"] for line in lines_in(tmp_path)] == ["started", "stopped"]
    with pytest.raises(ConfigError, match=r"has not finished: it has no weights\.safetensors"):
        read_run(tmp_path)


def test_numbers_that_are_not_finite_become_null(tmp_path, make_started):
    log = RunLog(tmp_path)
    log.write(make_started())
    log.write(EpochDone(1, 0.5, float("nan"), float("inf")))
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"train_loss": null, "test_accuracy": null, ' in last


def test_json_has_null_for_nan_at_any_depth_and_names_for_paths(tmp_path):
    value = {"a": [float("nan"), (float("-inf"), 1.5)], "b": {"c": tmp_path}, "d": None, "e": True}
    assert json.loads(to_json(value)) == {"a": [None, [None, 1.5]], "b": {"c": str(tmp_path)}, "d": None, "e": True}
    assert "\n" not in to_json(value)
    assert "\n" in to_json(value, indent=2)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(st.recursive(plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3)))
def test_any_value_becomes_json(value):
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    again = json.loads(to_json(value), parse_constant=no_constant)
    assert to_json(again) == to_json(value)


@pytest.mark.parametrize("problem", [ValueError("Invalid bounding box."), OSError(errno.EIO, "Input/output error")])
def test_a_picture_that_cannot_be_drawn_is_a_note_in_a_run_that_is_complete(
    tmp_path, monkeypatch, make_started, make_result, problem
):
    def fails(*args, **kwargs):
        raise problem

    monkeypatch.setattr(plots.Picture, "savefig", fails)
    log = RunLog(tmp_path)
    log.claim()
    log.write(make_started())
    log.write(RunDone(make_result()))
    assert names_in(tmp_path) == ["config.json", "metrics.jsonl", "result.json", "weights.safetensors"]
    note = lines_in(tmp_path)[-2]
    assert note["event"] == "note"
    assert note["sentence"].startswith("curve.png could not be drawn: ")
    assert f"lockstep report {tmp_path}" in note["sentence"]
    assert json.loads((tmp_path / "result.json").read_text()) == make_result().summary()


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("config.json", None),
        *((name, "done") for name in ("weights.safetensors", "curve.png", "result.json")),
        *((name, "stopped") for name in ("weights.safetensors", "curve.png")),
    ],
)
def test_a_failing_write_leaves_no_incomplete_file(
    tmp_path, monkeypatch, make_started, make_result, make_stopped, name, end
):
    folder = tmp_path / "run"

    def fails_on_one(path, write):
        def write_half(temporary):
            write(temporary)
            if path.name == name:
                assert temporary.exists()
                raise FULL

        write_whole(path, write_half)

    monkeypatch.setattr(runlog, "write_whole", fails_on_one)
    log = RunLog(folder)
    log.claim()
    if end is not None:
        log.write(make_started())
    event = {None: make_started(), "done": RunDone(make_result()), "stopped": make_stopped(2)}[end]
    with pytest.raises(RunError) as failed:
        log.write(event)
    assert str(failed.value) == (
        f"{folder} cannot be written to: No space left on device. Free some space, or choose another --out."
    )
    assert failed.value.__cause__ is FULL
    assert name not in names_in(folder)
    assert not [left for left in names_in(folder) if "part" in left]


def test_a_folder_that_vanishes_is_an_error_of_the_run(tmp_path, make_started):
    log = RunLog(tmp_path / "run")
    log.claim()
    log.write(make_started())
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(RunError, match="cannot be written to: No such file or directory"):
        log.write(EpochDone(1, 1.0, 1.0, 0.5))


@pytest.mark.parametrize("problem", [FULL, KeyboardInterrupt()])
def test_a_file_is_written_completely_or_not_at_all(tmp_path, problem):
    def half(path):
        path.write_text("half")
        raise problem

    (tmp_path / "kept").write_text("old")
    for name in ("new", "kept"):
        with pytest.raises(type(problem)):
            write_whole(tmp_path / name, half)
    assert names_in(tmp_path) == ["kept"]
    assert (tmp_path / "kept").read_text() == "old"


def test_a_file_appears_under_its_name_only_when_it_is_complete(tmp_path):
    seen = []

    def write(path):
        path.write_text("content")
        seen.append(names_in(tmp_path))

    write_whole(tmp_path / "file", write)
    assert seen == [[".part-file"]]
    assert names_in(tmp_path) == ["file"]


# --- reading files that are not trusted

WEIGHTS = save({"W": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, np.float32)})


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def read(folder, config=b"{}", weights=WEIGHTS):
    (folder / "config.json").write_bytes(config)
    (folder / "weights.safetensors").write_bytes(weights)
    return read_run(folder), read_weights(folder, 1 << 20)


def refusal(folder, **files):
    with pytest.raises(ConfigError) as refused:
        read(folder, **files)
    assert str(folder) in str(refused.value)
    return str(refused.value)


def test_settings_and_weights_of_a_run_are_read_back(tmp_path, make_started, make_result):
    log, result = RunLog(tmp_path), make_result()
    log.write(make_started())
    log.write(RunDone(result))
    config, weights = read_run(tmp_path), read_weights(tmp_path, 1 << 20)
    assert config.pop("versions")["lockstep"] == __version__
    assert config == {**make_started().config, "data_sha256": "cd" * 32, "made_with": {}}
    assert weights.keys() == result.params.keys()
    for name, array in result.params.items():
        assert weights[name].shape == array.shape
        assert weights[name].tobytes() == array.tobytes()


def test_a_folder_without_config_json_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError) as refused:
            read_run(folder)
        assert (
            str(refused.value)
            == f"{folder} is not a run: it has no config.json. Give the folder of one, like runs/NAME."
        )


def test_a_run_that_has_not_finished_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as refused:
        read_run(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path} is a run that has not finished: it has no weights.safetensors. Finish it: lockstep train --resume "
        f"--out {tmp_path}."
    )


def test_a_run_with_an_impossible_name_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        read_run(tmp_path / ("a" * 300))


@pytest.mark.parametrize(
    "config",
    [b"", b"{", b"{'a': 1}", b'{"a": 1', b"\xff\xfe\x00", b'{"a": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000]
    + [b'{"a": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "quotes", "open", "utf-16", "latin-1", "deep list", "deep object", "long number"],
)
def test_bad_json_is_refused(run_folder, config):
    assert "config.json cannot be read: " in refusal(run_folder, config=config)


@pytest.mark.parametrize("config", [b"[]", b"1", b'"a"', b"null", b"NaN"])
def test_json_that_is_no_object_is_refused(run_folder, config):
    assert refusal(run_folder, config=config) == (
        f"{run_folder / 'config.json'} does not hold the settings of a run. Restore it, or choose another run."
    )


def test_endless_json_is_refused(run_folder, monkeypatch):
    monkeypatch.setattr(runlog, "MAX_JSON_BYTES", 20)
    assert read(run_folder, config=b'{"a": "' + b"x" * 11 + b'"}')[0] == {"a": "x" * 11}
    assert "config.json cannot be read: " in refusal(run_folder, config=b'{"a": "' + b"x" * 12 + b'"}')


@pytest.mark.parametrize("num_bytes", [*range(10), len(WEIGHTS) // 2, len(WEIGHTS) - 1])
def test_truncated_weights_are_refused(run_folder, num_bytes):
    assert "weights.safetensors is damaged: " in refusal(run_folder, weights=WEIGHTS[:num_bytes])


@pytest.mark.parametrize("weights", [b"rubbish" * 100, bytes(100), b"\xff" * 100, WEIGHTS + b"!", b"PK\x03\x04" * 30])
def test_weights_that_are_no_safetensors_are_refused(run_folder, weights):
    assert "weights.safetensors is damaged: " in refusal(run_folder, weights=weights)


def forged(**entry):
    header = json.dumps({"W": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F33"},
        {"dtype": "F64"},
        {"shape": [2]},
        {"shape": [-1]},
        {"shape": [1.5]},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 100},
        {"data_offsets": [4, 0]},
        {"data_offsets": [0, 2**40]},
    ],
    ids=str,
)
def test_a_forged_header_is_refused(run_folder, entry):
    assert "weights.safetensors is damaged: " in refusal(run_folder, weights=forged(**entry))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_weights_of_a_dtype_that_numpy_does_not_have_are_refused(run_folder, dtype):
    assert "weights.safetensors is damaged: " in refusal(run_folder, weights=forged(dtype=dtype, shape=[4]))


changes = st.lists(st.tuples(st.integers(0, len(WEIGHTS) - 1), st.integers(1, 255)), max_size=4)


@given(changes=changes, num_cut=st.just(0) | st.integers(0, len(WEIGHTS)))
@settings(deadline=None, max_examples=300)
def test_damaged_weights_give_arrays_or_a_config_error_and_never_another_exception(run_folder, changes, num_cut):
    damaged = bytearray(WEIGHTS)
    for offset, flip in changes:
        damaged[offset] ^= flip
    damaged = bytes(damaged[: len(WEIGHTS) - num_cut])
    try:
        config, weights = read(run_folder, weights=damaged)
    except ConfigError as refused:
        sentence = str(refused)
    else:
        assert config == {}
        assert all(isinstance(array, np.ndarray) for array in weights.values())
        return
    assert f"{run_folder / 'weights.safetensors'} is damaged: " in sentence
    assert damaged != WEIGHTS


@given(config=st.binary(max_size=30))
@settings(deadline=None)
def test_any_bytes_as_settings_give_an_object_or_a_config_error(run_folder, config):
    try:
        found, _ = read(run_folder, config=config)
    except ConfigError as refused:
        sentence = str(refused)
    else:
        assert isinstance(found, dict)
        return
    assert str(run_folder / "config.json") in sentence


def test_a_folder_that_cannot_be_listed_is_refused_and_unlocked(tmp_path, monkeypatch):
    log = RunLog(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.report.runlog.is_empty", fails)
        with pytest.raises(ConfigError, match=r"cannot be read: Input/output error\. Choose another --out"):
            log.claim()
    again = RunLog(tmp_path)
    again.claim()
    again.close()


def fails(*arguments):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_when_a_finished_run_is_closed_does_not_undo_it(tmp_path, monkeypatch):
    log = RunLog(tmp_path)
    log.claim()
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.report.runlog.os.close", fails)
        log.close()
