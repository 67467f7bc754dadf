"""Damaged checkpoints and data files, from the command line: each is refused in a sentence, and nothing is touched."""

import gzip
import hashlib
import io
import json
import shutil
import struct
import sys
import zipfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.data import fashion_mnist, sources
from lockstep.data.fashion_mnist import IdxFile

MODEL = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
"""
SETTINGS = ("--model", "small_file:make_model", "--batch-size", "4", "--shards", "2", "--devices", "1")


def command(*arguments):
    """`lockstep ARGUMENTS` in this process: its status, and what it wrote to standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return left.value.code or 0, out.getvalue(), err.getvalue()


def snapshot(folder):
    """All that is in a folder: names, kinds and bytes."""
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check_refused(answer, path):
    """Status 2, nothing on standard output, and one sentence that names the file."""
    status, out, err = answer
    assert status == 2, err
    assert out == ""
    assert err.startswith("lockstep: ")
    assert err.count("\n") == 1, err
    assert str(path) in err
    assert "Traceback" not in err


# --- kinds of damage


KINDS = (
    "truncated",
    "bits flipped",
    "bytes replaced",
    "block zeroed",
    "blocks swapped",
    "bytes appended",
    "bytes inserted",
    "block removed",
    "length changed",
)
NUMBERS = st.integers(0, 2**32 - 1).map(lambda number: number * 2_654_435_761 % 2**32)  # anywhere, not near the ends


@st.composite
def damaged(draw, content, fields=()):
    """`content`, damaged in one or two ways. `fields` are offsets of four-byte lengths in its header."""
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        content = draw(damaged_once(content, fields))
    return content


@st.composite
def damaged_once(draw, content, fields):
    if not content:
        return draw(st.binary(max_size=40))
    size = len(content)
    at, length = draw(NUMBERS) % size, 1 + draw(NUMBERS) % min(size, 64)
    match draw(st.sampled_from(KINDS)):
        case "truncated":
            return content[: draw(st.sampled_from([0, 1, 7, 8, 9, size - 1, at, at, at]))]
        case "bits flipped":
            spoilt = bytearray(content)
            for _ in range(draw(st.sampled_from([1, 1, 2, 8]))):
                spoilt[draw(NUMBERS) % size] ^= 1 << draw(st.integers(0, 7))
            return bytes(spoilt)
        case "bytes replaced":
            other = draw(st.binary(min_size=1, max_size=8))
            return (content[:at] + other + content[at + len(other) :])[:size]
        case "block zeroed":
            return (content[:at] + bytes(length) + content[at + length :])[:size]
        case "blocks swapped":
            length = min(length, size // 2)
            first, second = sorted((draw(NUMBERS) % (size - length + 1), draw(NUMBERS) % (size - length + 1)))
            assume(second >= first + length)
            one, two = content[first : first + length], content[second : second + length]
            return content[:first] + two + content[first + length : second] + one + content[second + length :]
        case "bytes appended":
            return content + draw(st.binary(min_size=1, max_size=40) | st.just(bytes(8)) | st.just(content))
        case "bytes inserted":
            return content[:at] + draw(st.binary(min_size=1, max_size=40)) + content[at:]
        case "block removed":
            return content[:at] + content[at + length :]
        case "length changed":
            at = draw(st.sampled_from(fields)) if fields else at
            number = draw(st.integers(0, 2**32 - 1) | st.integers(0, 2 * size))
            return (content[:at] + struct.pack(draw(st.sampled_from("<>")) + "I", number) + content[at + 4 :])[:size]
    raise AssertionError("not one of KINDS")


# --- the files


class Files(NamedTuple):
    """A dataset in several forms."""

    folder: Path
    contents: dict[str, bytes]  # by name
    data_sha256: str
    weights_sha256: dict[str, str]  # of a run, by form

    def form(self, name):
        return name if name.endswith(".npz") else "fashion-mnist"


def as_idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def as_npz(save, arrays):
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """12 + 4 images of 8 x 8 as .npz files, stored and compressed, and as all that Fashion-MNIST consists of."""
    folder = tmp_path_factory.mktemp("damaged")
    random = np.random.RandomState(3)
    arrays = {
        "X_train": random.randint(0, 256, (12, 8, 8)).astype(np.uint8),
        "y_train": np.arange(12) % 4,
        "X_test": random.randint(0, 256, (4, 8, 8)).astype(np.uint8),
        "y_test": np.arange(4),
    }
    idx = {
        file.name: as_idx(array.astype(np.uint8))
        for file, array in zip(fashion_mnist.FILES, arrays.values(), strict=True)
    }
    known = tuple(IdxFile(f.name, f.num_dims, hashlib.sha256(idx[f.name]).hexdigest()) for f in fashion_mnist.FILES)
    contents = {"stored.npz": as_npz(np.savez, arrays), "compressed.npz": as_npz(np.savez_compressed, arrays)}
    contents |= idx | {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in idx.items()}
    (folder / "small_file.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setattr(fashion_mnist, "FILES", known)
        patch.setattr(sources, "FILES", known)
        made = Files(folder, contents, "", {})
        hashes = {}
        for name in ("stored.npz", "compressed.npz", known[0].name):
            answer = train(made, name, contents[name])
            assert answer[0] == 0, answer[2]
            hashes[made.form(name)] = json.loads(answer[1])["weights_sha256"]
            sha256 = json.loads((folder / "run" / "config.json").read_text())["data_sha256"]
            made = made._replace(data_sha256=made.data_sha256 or sha256)
            assert sha256 == made.data_sha256
        yield made._replace(weights_sha256=hashes)
        sys.modules.pop("small_file", None)


def train(files, name, content):
    """The answer of a run with `content` as one of the files; the others of Fashion-MNIST are correct."""
    shutil.rmtree(files.folder / "run", ignore_errors=True)
    path = path_of(files, name)
    path.parent.mkdir(exist_ok=True)
    if name.endswith(".npz"):
        data = ("--data", path)
    else:
        for left in path.parent.iterdir():
            left.unlink()
        for file in fashion_mnist.FILES:
            other = f"{file.name}.gz" if name.endswith(".gz") else file.name
            (path.parent / other).write_bytes(files.contents[other])
        data = ("--data", "fashion-mnist", "--data-dir", path.parent)
    path.write_bytes(content)
    return command("train", *SETTINGS, *data, "--epochs", 1, "--checkpoint-every", 0, "--out", "run", "--json")


def path_of(files, name):
    return files.folder / "data" / name


def has_the_same_data(name, content, good):
    """Whether other readers get the same data from a damaged file: zip and gzip files have bytes without meaning."""
    try:
        if name.endswith(".gz"):
            return gzip.decompress(content) == gzip.decompress(good)
        if not name.endswith(".npz"):
            return False
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if archive.testzip() is not None:
                return False
        with np.load(io.BytesIO(content)) as found, np.load(io.BytesIO(good)) as expected:
            return all(
                found[part].dtype == array.dtype and np.array_equal(found[part], array)
                for part, array in expected.items()
            )
    except Exception:  # whatever the other reader raises
        return False


FIELDS = {".npz": (14, 18, 22), ".gz": (-8, -4), "": (4, 8, 12)}  # checksum and sizes; the same; dimensions


@st.composite
def data_files(draw, files):
    """The name of one of the files, and its damaged content."""
    name = draw(st.sampled_from(sorted(files.contents)) | st.sampled_from(["stored.npz", "compressed.npz"]))
    content = files.contents[name]
    fields = tuple(at % len(content) for at in FIELDS[Path(name).suffix])
    return name, draw(damaged(content, fields))


def examples(number):
    """Settings for a test with this many damaged files."""
    return settings(max_examples=number, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(data=st.data())
@examples(50)
def test_damaged_data_files_are_refused_or_hold_the_same_data(files, data):
    check_damaged_data_file(files, *data.draw(data_files(files)))


@pytest.mark.long
@given(data=st.data())
@examples(1000)
def test_a_thousand_damaged_data_files_are_refused_or_hold_the_same_data(files, data):
    check_damaged_data_file(files, *data.draw(data_files(files)))


def check_damaged_data_file(files, name, content):
    assume(content != files.contents[name])
    answer = train(files, name, content)
    if answer[0] == 0:  # a zip file may start with other bytes, which not every reader accepts
        assert json.loads((files.folder / "run" / "config.json").read_text())["data_sha256"] == files.data_sha256
        assert json.loads(answer[1])["weights_sha256"] == files.weights_sha256[files.form(name)]
    else:
        assert not has_the_same_data(name, content, files.contents[name]), answer[2]
        check_refused(answer, path_of(files, name))
        assert not (files.folder / "run").exists()
        assert path_of(files, name).read_bytes() == content
    assert not (files.folder / "runs").exists()


def test_bytes_of_a_zip_file_without_meaning_are_no_damage(files):
    """Like the time of a member: so the test above has both cases."""
    spoilt = bytearray(files.contents["stored.npz"])
    spoilt[10] ^= 1
    assert has_the_same_data("stored.npz", bytes(spoilt), files.contents["stored.npz"])
    assert train(files, "stored.npz", bytes(spoilt))[0] == 0


@pytest.mark.parametrize("is_checksum_right", [False, True])
def test_an_array_that_is_shorter_than_its_zip_member_is_refused(files, is_checksum_right):
    """The checksum is compared at the end of the member, which a reader of the array does not reach."""
    X, y = np.zeros((1500, 8, 8), np.uint8), np.arange(1500) % 4  # more than is read ahead
    good = as_npz(np.savez, {"X_train": X, "y_train": y, "X_test": X[:4], "y_test": y[:4]})
    spoilt = good.replace(b"'<i8'", b"'<i4'", 1)  # half of the bytes are read: 0, 0, 1, 0, 2, ...
    if is_checksum_right:
        file = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(file, "w") as new:
            for member in old.namelist():
                content = old.read(member)
                new.writestr(member, content.replace(b"'<i8'", b"'<i4'") if "train" in member else content)
        spoilt = file.getvalue()
    assert b"'<i4'" in spoilt
    check_refused(train(files, "stored.npz", spoilt), path_of(files, "stored.npz"))
    assert not (files.folder / "run").exists()


# --- checkpoints


@pytest.fixture(scope="module")
def begun(files):
    """A run with one checkpoint, in mid-epoch, and the hash of its weights when it is whole."""
    folder = files.folder / "begun"
    path_of(files, "stored.npz").write_bytes(files.contents["stored.npz"])
    how = ("--data", path_of(files, "stored.npz"), "--optimizer", "adam", "--epochs", 2)
    answer = command("train", *SETTINGS, *how, "--checkpoint-every", 2, "--out", folder, "--json")
    assert answer[0] == 0, answer[2]
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("config.json", "metrics.jsonl", "step-000004.safetensors"):
            path.unlink()
    return folder, folder / "checkpoints" / "step-000004.safetensors", json.loads(answer[1])["weights_sha256"]


def resume(files, folder):
    path_of(files, "stored.npz").write_bytes(files.contents["stored.npz"])
    return command("train", "--resume", "--out", folder, *SETTINGS[:2], "--devices", 1, "--json")


@pytest.fixture(scope="module")
def good(begun):
    return begun[1].read_bytes()


@given(data=st.data())
@examples(50)
def test_damaged_checkpoints_are_refused_and_nothing_is_touched(files, begun, good, data):
    check_damaged_checkpoint(files, begun, good, data.draw(damaged(good, (0, 4))))


@pytest.mark.long
@given(data=st.data())
@examples(1000)
def test_a_thousand_damaged_checkpoints_are_refused_and_nothing_is_touched(files, begun, good, data):
    check_damaged_checkpoint(files, begun, good, data.draw(damaged(good, (0, 4))))


def check_damaged_checkpoint(files, begun, good, content):
    folder, path, _ = begun
    assume(content != good)
    path.write_bytes(content)
    before = snapshot(folder)
    answer = resume(files, folder)
    check_refused(answer, path)
    assert f"{path} is damaged: " in answer[2]
    assert "There is no other checkpoint to resume from. To start over, choose another --out." in answer[2]
    assert snapshot(folder) == before


def test_the_checkpoint_that_is_damaged_above_is_a_good_one(files, begun, good, tmp_path):
    folder, path, expected = begun
    path.write_bytes(good)
    copied = Path(shutil.copytree(folder, tmp_path / "run"))
    status, out, err = resume(files, copied)
    assert status == 0, err
    assert "continuing after step 4" in err
    assert json.loads(out)["weights_sha256"] == expected


# --- the damage itself


def test_all_kinds_of_damage_are_tried_all_over_a_file():
    """Otherwise a thousand files could all be the same."""
    content = bytes(range(256)) * 4
    seen, offsets, lengths = Counter(), set(), set()

    @given(damaged(content))
    @settings(max_examples=300, database=None)
    def look(found):
        seen["shorter" if len(found) < 1024 else "longer" if len(found) > 1024 else "as long"] += 1
        offsets.add(next((at for at, (a, b) in enumerate(zip(found, content, strict=False)) if a != b), 1024) // 64)
        lengths.add(len(found))

    look()
    assert min(seen.values()) > 20
    assert {*range(16)} <= offsets
    assert 0 in lengths
