"""Damaged and forged files and messages: each ends in a sentence, at once, and takes little memory.

    python benchmarks/forged.py                  # 10,000, from a fixed seed
    python benchmarks/forged.py --count 500 --only config

Files and messages of a real run are damaged (bits, bytes, blocks, lengths) or forged (another value in a structure
whose checksum fits), and given to what reads them. Whatever comes is an answer of Lockstep's: the value, or its own
error. Any other exception, an answer that takes longer than 10 seconds, a terminal escape in what is shown, and more
memory than 1 GB above that before, are failures.
"""

import argparse
import gzip
import io
import json
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import LockstepError

LIMIT_SECONDS, LIMIT_BYTES = 10, 1 << 30
RESULTS = Path(__file__).parent / "results" / "forged.jsonl"
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 2**63, -(2**63), 10**40),
    *(0.0, -0.0, 0.5, 1e308, float("nan"), float("inf")),
    *("", "a", "\0", "\x1b[2J\x1b]0;owned\x07", "../../etc/passwd", "/dev/zero", "é\ud800", "x" * 5000, "1", "nan"),
    *([], [[]], [None], {}, {"$array": "a"}, {"$tuple": []}, {"$pairs": [[1, 2]]}, (), [1] * 1000, {"a": {"b": {}}}),
    *("os:system", "lenet", "processes", "cpu:0,cpu:1", "cuda:0", "transformer", "adam"),
]


class Refused(LockstepError):
    """A command has ended with a sentence."""


class Hang(BaseException):
    """The time is out."""


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The bytes with some of them changed, added or lost."""
    size, at = len(content), draw.randrange(len(content) + 1)
    length = min(size - at, draw.choice([1, 2, 4, 8, 64, 1024]))
    other = draw.choice([bytes(length), b"\xff" * length, draw.randbytes(length), content[:length]])
    match draw.choice(["cut", "bit", "bit", "replace", "insert", "remove", "length", "random", "append"]):
        case "cut":
            return content[:at]
        case "bit":
            spoilt = bytearray(content)
            for _ in range(draw.choice([1, 1, 8])):
                spoilt[draw.randrange(size)] ^= 1 << draw.randrange(8)
            return bytes(spoilt)
        case "insert":
            return content[:at] + other + content[at:]
        case "remove":
            return content[:at] + content[at + length :]
        case "length":  # near the start, where lengths are
            number = draw.choice([0, 1, size, size * 2, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
            packed = struct.pack(draw.choice("<>") + "Q", number)[: draw.choice([4, 8])]
            at = draw.choice([0, 4, 8, 18, 22, 26, at])
            return content[:at] + packed + content[at + len(packed) :]
        case "random":
            return draw.randbytes(draw.choice([0, 1, 8, 100]))
        case "append":
            return content + (other or b"x")
    return content[:at] + other + content[at + length :]


def forged(tree: Any, draw: random.Random) -> Any:
    """A copy of a tree of dicts, lists and arrays, with one entry that is something else, gone, or too much."""
    if isinstance(tree, np.ndarray) and draw.random() < 0.8:
        return forged_array(tree, draw)
    if not isinstance(tree, (dict, list, tuple)) or not tree or draw.random() < 0.15:
        return draw.choice(HOSTILE)
    if isinstance(tree, dict):
        name = draw.choice(list(tree))
        match draw.choice(["change"] * 6 + ["remove", "add", "rename"]):
            case "remove":
                return {key: value for key, value in tree.items() if key != name}
            case "add":
                return {**tree, draw.choice([h for h in HOSTILE if isinstance(h, str)]): draw.choice(HOSTILE)}
            case "rename":
                return {f"\x1b[31m{key}" if key == name else key: value for key, value in tree.items()}
        return {key: forged(value, draw) if key == name else value for key, value in tree.items()}
    at = draw.randrange(len(tree))
    entries = [forged(entry, draw) if number == at else entry for number, entry in enumerate(tree)]
    return draw.choice([entries, entries, entries[:at], entries * 2])


def forged_array(array: Any, draw: random.Random) -> Any:
    """Another dtype, shape or content."""
    flat = array.reshape(-1)
    match draw.choice(["nan", "huge", "short", "dtype", "shape", "empty"]):
        case "nan" | "huge" as what if array.dtype.kind == "f" and flat.size:
            changed = flat.copy()
            changed[draw.randrange(flat.size)] = np.nan if what == "nan" else np.finfo(array.dtype).max
            return changed.reshape(array.shape)
        case "short":
            return flat[:-1]
        case "dtype":
            with np.errstate(all="ignore"):
                return array.astype(draw.choice([np.float64, np.int64, np.uint8, np.bool_, np.complex64, np.float16]))
        case "shape":
            return flat.reshape(draw.choice([(-1, 1), (1, -1), (1,) * 20 + (-1,)]))
    return np.zeros(draw.choice([0, 1, (0, 5)]), array.dtype)


@cache
def npz_bomb(num_labels: int) -> bytes:
    """An archive that unpacks to a thousand times its size; made in pieces, so that making it takes no memory."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("X_train", "y_train", "X_test", "y_test"):
            with archive.open(f"{name}.npy", "w") as member:
                header = {"descr": "|u1", "fortran_order": False, "shape": (num_labels,)}
                np.lib.format.write_array_header_1_0(member, header)
                for _ in range(num_labels >> 20):
                    member.write(bytes(1 << 20))
    return file.getvalue()


@cache
def idx_bomb(num_labels: int) -> bytes:
    """The same as labels in a gzip file."""
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as packed:
        packed.write(bytes([0, 0, 8, 1]) + struct.pack(">I", num_labels))
        for _ in range(num_labels >> 20):
            packed.write(bytes(1 << 20))
    return file.getvalue()


class Forger:
    """A small run, its files, and for each kind of them a function that damages one and has it read."""

    def __init__(self, folder: Path) -> None:
        import torch

        self._folder = folder
        random_numbers = np.random.RandomState(0)
        X, y = random_numbers.randint(0, 256, (24, 1, 28, 28)).astype(np.uint8), random_numbers.randint(0, 10, 24)
        self._arrays = {"X_train": X, "y_train": y, "X_test": X[:6], "y_test": y[:6]}
        np.savez(folder / "data.npz", **self._arrays)
        self._options = ["--data", str(folder / "data.npz"), "--batch-size", "6", "--epochs", "2", "--shards", "2"]
        lenet = [*self._options, "--backend", "numpy", "--momentum", "0.9", "--lr", "0.01", "--devices", "1"]
        self.command("train", *lenet, "--trace", "--out", folder / "lenet")
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        self._module = {"model": net, "data": (X, y), "optimizer": "adam", "batch_size": 6, "shards": 2, "devices": 1}
        self._train_module(folder / "module")
        self.kinds: dict[str, Callable[[random.Random], None]] = {
            name.removeprefix("read_"): getattr(self, name) for name in dir(self) if name.startswith("read_")
        }

    def command(self, *arguments: Any) -> None:
        """`lockstep ARGUMENTS` in this process."""
        from lockstep.cli import main

        out, status = io.StringIO(), None
        with redirect_stdout(out), redirect_stderr(out):
            try:
                main([str(argument) for argument in arguments])
            except SystemExit as end:
                status = end.code
        said = out.getvalue()
        assert status in (None, 0, 1, 2), status
        assert "Traceback" not in said, said
        assert "\x1b" not in said, said
        if status:
            raise Refused(said)

    def _train_module(self, out: Path, resume: bool = False) -> None:
        import lockstep

        lockstep.train(**self._module, epochs=1, lr=0.01, out=out, resume=resume, quiet=True, verify_every=0)

    def _copy(self, name: str) -> Path:
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._folder / name, copy)
        return copy

    def _write_forged_checkpoint(self, run: Path, draw: random.Random) -> None:
        from lockstep.core.serialization import NotSerializable, pack, unpack

        *others, path = sorted((run / "checkpoints").iterdir())
        for other in others:
            other.unlink()
        content = path.read_bytes()
        if draw.random() < 0.3:
            path.write_bytes(damaged(content, draw))
            return
        try:
            path.write_bytes(pack(forged(unpack(content), draw)))
        except (NotSerializable, ValueError, OverflowError):  # not even `pack` takes it: in the header, as it comes
            path.write_bytes(content.replace(b"progress", draw.randbytes(8), 1))

    def read_checkpoint(self, draw: random.Random) -> None:
        run = self._copy("lenet")
        self._write_forged_checkpoint(run, draw)
        self.command("train", "--resume", "--out", run, "--epochs", "2", "--devices", "1")

    def read_checkpoint_of_module(self, draw: random.Random) -> None:
        run = self._copy("module")
        self._write_forged_checkpoint(run, draw)
        self._train_module(run, resume=True)

    def read_config(self, draw: random.Random) -> None:
        run = self._copy("lenet")
        path = run / "config.json"
        content = path.read_bytes()
        if draw.random() < 0.3:
            path.write_bytes(damaged(content, draw))
        else:
            path.write_text(json.dumps(forged(json.loads(content), draw)))
        given = ("--epochs", 2, "--devices", 1)  # or it would have as many as the file says
        self.command(*draw.choice([("train", "--resume", "--out", run, *given), ("evaluate", run, "--devices", 1)]))

    def read_weights(self, draw: random.Random) -> None:
        from safetensors.numpy import load, save

        run = self._copy("lenet")
        path = run / "weights.safetensors"
        content = path.read_bytes()
        if draw.random() < 0.5:
            path.write_bytes(damaged(content, draw))
        else:
            weights = load(content)
            name = draw.choice(list(weights))
            weights[draw.choice([name, "\x1b[31mred"])] = np.ascontiguousarray(forged_array(weights.pop(name), draw))
            path.write_bytes(save(weights))
        self.command("evaluate", run, "--devices", 1)

    def read_recorded_run(self, draw: random.Random) -> None:
        """What `report`, `runs` and `compare` show of a run."""
        run = self._copy("lenet")
        path = run / draw.choice(["config.json", "result.json", "metrics.jsonl", "metrics.jsonl", "trace.json"])
        content = path.read_bytes()
        if draw.random() < 0.2:
            path.write_bytes(damaged(content, draw))
        elif path.suffix == ".jsonl":
            lines = content.decode().splitlines()
            at = draw.randrange(len(lines))
            lines[at] = json.dumps(forged(json.loads(lines[at]), draw))
            path.write_text("\n".join(lines))
        else:
            path.write_text(json.dumps(forged(json.loads(content), draw)))
        more = (self._folder / "lenet",) if draw.random() < 0.5 else ()
        to = self._folder / "compared"
        shutil.rmtree(to, ignore_errors=True)
        listed = [("runs", run), ("runs", run, "--json"), ("runs", run, "--sort", "speed")]
        self.command(*draw.choice([("report", run, *more), ("compare", run, *more, "--out", to), *listed]))

    def read_toml(self, draw: random.Random) -> None:
        """Settings in a file of the user's."""
        tree = {"batch-size": 6, "lr": 0.1, "data": "fashion-mnist-mini", "model": "lenet", "devices": 2, "heal": True}
        name, other = draw.choice(list(tree)), draw.choice(HOSTILE)
        plain = {**tree, name: other if isinstance(other, (bool, int, float, str, list)) else "a"}
        text = "\n".join(f"{key} = {json.dumps(value).lower()}" for key, value in plain.items()).encode()
        path = self._folder / "run.toml"
        path.write_bytes(damaged(text, draw) if draw.random() < 0.5 else text)
        self.command("train", "--config", path, "--dry-run")

    def read_npz(self, draw: random.Random) -> None:
        from lockstep.data.npz import read_npz

        path, file = self._folder / "forged.npz", io.BytesIO()
        save = draw.choice([np.savez, np.savez_compressed])
        if draw.random() < 0.5:
            save(file, **self._arrays)
            path.write_bytes(damaged(file.getvalue(), draw))
        elif draw.random() < 0.05:
            path.write_bytes(npz_bomb(draw.choice([1 << 20, 1 << 24, 1 << 26])))
        else:
            name = draw.choice(list(self._arrays))
            save(file, **{**self._arrays, name: forged_array(self._arrays[name], draw)})
            path.write_bytes(file.getvalue())
        read_npz(path, "forged")

    def read_idx(self, draw: random.Random) -> None:
        from lockstep.data.idx import check_labels, parse_idx, unpack

        path, images = self._folder / "forged.idx", draw.random() < 0.5
        array = self._arrays["X_train"][:, 0] if images else self._arrays["y_train"].astype(np.uint8)
        content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
        match draw.choice(["plain", "plain", "packed", "inside"]):
            case "plain":
                content = damaged(content, draw)
            case "packed":
                content = damaged(gzip.compress(content, 1), draw)
            case "inside":
                content = gzip.compress(damaged(content, draw), 1)
        if draw.random() < 0.01:
            content = idx_bomb(1 << 28)
        path.write_bytes(content)
        found = parse_idx(unpack(path), array.ndim, str(path))
        if not images:
            check_labels(found, 10, str(path))

    def read_message(self, draw: random.Random) -> None:
        """What ranks send to each other, and what one offers the others to continue from."""
        from lockstep.core.serialization import pack
        from lockstep.runtime.process_transport import check_same_call
        from lockstep.runtime.stage_messages import unpacked_messages
        from lockstep.training.elastic import _of_this_run

        if draw.random() < 0.5:
            content = sorted((self._folder / "lenet" / "checkpoints").iterdir())[-1].read_bytes()
            _of_this_run(damaged(content, draw), {})
        else:
            content = pack({"call": "step", "value": [1, "a", {"b": np.arange(7, dtype=np.float32)}]})
            check_same_call("step", unpacked_messages([content, damaged(content, draw)]))

    def read_store_value(self, draw: random.Random) -> None:
        """What anybody may write into torchrun's store."""
        from lockstep.runtime.launch.heartbeat import _heartbeat
        from lockstep.training.torchrun import _device

        tree = {"count": 3, "step": 7, "phase": "exchange", "line": "nets.py:12"}
        text = json.dumps(forged(tree, draw)).encode()
        value = draw.choice([text, damaged(text, draw), b"[" * 5000, b"9" * 5000])
        found = _heartbeat(value)
        assert found is None or "\x1b" not in str(found)
        _device(draw.choice([value, damaged(b"cpu:0", draw), damaged(b"cuda:12", draw)]))

    def read_store_message(self, draw: random.Random) -> None:
        """What a worker may send to the store of its supervisor, and the answers."""
        from lockstep.runtime.launch.private_store import PrivateStore, SupervisorGone, WorkerStore

        said = json.dumps(forged(["set", "heartbeat/0", "text"], draw)).encode()
        message = struct.pack("<I", len(said)) + said
        message = draw.choice([message, damaged(message, draw), struct.pack("<I", 6000) + b"[" * 6000])
        store, failed = PrivateStore(), list[Any]()
        end = store.new_connection()
        worker, before = end.dup(), threading.excepthook
        threading.excepthook = failed.append  # it is served in a thread
        store.serve(end)
        with worker:
            worker.sendall(message)
            worker.shutdown(socket.SHUT_WR)
            for thread in threading.enumerate():
                if thread.name == "lockstep-store":
                    thread.join()
        store.close()
        threading.excepthook = before
        assert not failed, failed
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(message)
            theirs.shutdown(socket.SHUT_WR)
            with suppress(SupervisorGone):
                WorkerStore(ours, 1.0).check(["stop"])


def memory(name: str) -> int:
    """Bytes of this process: VmRSS are those now, VmHWM the most since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def forget_peak() -> None:
    """The most so far is what there is now."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> int:
    """Prints and keeps the figures; the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="kinds that begin so")
    parser.add_argument("--case", type=int, help="only the one with this number")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures are appended")
    options = parser.parse_args()
    from lockstep.bench.results import append_result, describe_run

    def on_alarm(number: int, frame: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, on_alarm)
    failures, answers, began, slowest = [], Counter(), time.monotonic(), 0.0
    with tempfile.TemporaryDirectory(prefix="lockstep-forged-") as name:
        forger, _, _ = Forger(Path(name)), idx_bomb(1 << 28), npz_bomb(1 << 26)
        forget_peak()
        before = memory("VmRSS")
        kinds = [kind for kind in forger.kinds if kind.startswith(options.only or "")]
        for number in range(options.count) if options.case is None else [options.case]:
            draw, kind = random.Random(f"{options.seed} {number}"), kinds[number % len(kinds)]
            start, answer = time.monotonic(), "taken"
            signal.alarm(LIMIT_SECONDS)
            try:
                forger.kinds[kind](draw)
            except LockstepError as problem:
                answer = "refused"
                str(problem).encode(errors="replace")
            except BaseException as problem:
                answer = "failed"
                failures.append({"case": number, "kind": kind, "raised": f"{type(problem).__name__}: {problem}"[:2000]})
                print(json.dumps(failures[-1]), file=sys.stderr, flush=True)
                if options.case is not None:
                    raise
            finally:
                signal.alarm(0)
            slowest = max(slowest, time.monotonic() - start)
            answers[f"{kind} {answer}"] += 1
    extra = memory("VmHWM") - before
    figures = {
        "cases": answers.total(), "failures": failures, "megabytes above the run's own": extra >> 20,
        "slowest seconds": round(slowest, 2), "seconds": round(time.monotonic() - began), "answers": answers,
    }  # fmt: skip
    print(json.dumps(figures, indent=2))
    if options.case is None:
        command = f"python benchmarks/forged.py {' '.join(sys.argv[1:])}".rstrip()
        append_result(options.out, {**describe_run(command), "seed": options.seed, **figures})
    return len(failures) + (extra > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(bool(main()))
