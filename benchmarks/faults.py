"""A fault at every call: a short run is repeated, and each of its file-system calls fails once, or is its last.

    python benchmarks/faults.py --engine inprocess
    python benchmarks/faults.py --engine processes --every 10
    python benchmarks/faults.py --engine processes --part resumed --calls 1-60

Counts the calls of a run with checkpoints below its folder and TMPDIR, in all its processes (`file_faults.c`: open,
read, write, fsync, rename, unlink, mkdir, stat, close, ...); and those of a run that was killed and is resumed. Then,
for each of them and each kind of fault (SIGKILL at the call, in the middle of a write; EIO; ENOSPC), it is run once
more with that fault, and resumed. Every run has to end with the hash of the undisturbed one, or with a sentence, or
killed, and then with that hash when it is resumed. The figures are appended to results/faults.jsonl, if --out says so.
"""

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from file_faults import FileFaults, forget_library, preload

FAULTS = {"SIGKILL": 0, "EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
LIMIT_SECONDS = 120  # for one run
OUTCOMES = {0: "same hash at once", 1: "a sentence, then the same hash", -signal.SIGKILL: "killed, then the same hash"}


def train(folder: Path, data: Any, engine: str, resume: bool) -> str:
    """The hash of a short run with checkpoints, by the API and without importing anything: this is a forked process."""
    import lockstep

    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    how: dict[str, Any] = {"batch_size": 6, "num_epochs": 2, "lr": 0.05, "checkpoint_every": 3, "keep_checkpoints": 2}
    backend = {"backend": "numpy"} if engine == "inprocess" else {"engine": "processes"}
    out = folder / "run"
    how |= {"data": data, "out": out, "resume": resume, "shards": 2, "verify_every": 0, "quiet": True}
    return lockstep.train(2, **how, **backend).weights_sha256


def run(folder: Path, data: Any, engine: str, faults: FileFaults | None, resume: bool) -> tuple[int, str]:
    """Exit status, and the hash or what was said, of a run in a process of its own."""
    from lockstep.core.errors import LockstepError

    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)
        errors = os.open(folder.with_suffix(".errors"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(errors, 2)
        status, said = 3, "an exception"
        try:
            if faults is not None:
                faults.begin()
            status, said = 0, train(folder, data, engine, resume)
        except LockstepError as problem:
            status, said = 1, str(problem)
        except BaseException as problem:
            said = repr(problem)
        finally:
            os.write(writer, said.encode()[:4000])
            os._exit(status)
    os.close(writer)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with open(reader, "rb") as answer:
        said = answer.read().decode(errors="replace")
    if not ended[0]:
        os.waitpid(child, 0)
        return 124, f"it was not over after {LIMIT_SECONDS} s"
    return os.waitstatus_to_exitcode(ended[1]), said


class Case(NamedTuple):
    """A run that is disturbed: from its start, or where `start`, a folder that is copied, was left."""

    engine: str
    data: Any
    expected: str  # its hash
    start: Path | None = None

    def run(self, folder: Path, faults: FileFaults | None) -> tuple[int, str]:
        """The run with these faults in a folder that is not there yet."""
        if self.start is not None:
            shutil.copytree(self.start, folder)
        return run(folder, self.data, self.engine, faults, resume=self.start is not None)

    def disturbed(self, folder: Path, number: int, kind: str) -> tuple[str, Any]:
        """How the run ended with one fault; and what was wrong with it, if anything."""
        faults = FileFaults(folder, number, FAULTS[kind])
        status, said = answer = self.run(folder, faults)
        if answer != (0, self.expected):
            answer = run(folder, self.data, self.engine, None, resume=True)
        errors = folder.with_suffix(".errors").read_text()
        is_right = status in OUTCOMES and answer == (0, self.expected) and "Traceback" not in errors
        if is_right and faults.num_failed == 1:
            return OUTCOMES[status], None
        call = faults.calls()[number - 1] if faults.count >= number else "not reached"
        details = {"call": number, "is": call, "fault": kind, "status": status, "said": said, "resumed": answer}
        return "wrong", {**details, "errors": errors[-2000:]}


def main() -> int:
    """Prints what was found; the number of runs that did not end as they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["inprocess", "processes"], default="inprocess")
    parser.add_argument("--every", type=int, default=1, help="only every n-th call")
    parser.add_argument("--call", type=int, help="only this one")
    parser.add_argument("--calls", default="1-", help="only these: first-last")
    parser.add_argument("--out", type=Path, help="where the figures are appended")
    parser.add_argument("--part", default="first,resumed", help="first: a new run; resumed: one that ended early")
    parser.add_argument("--list", action="store_true", help="print the calls, and let none fail")
    options = parser.parse_args()
    preload()
    forget_library()
    import numpy as np
    import torch._dynamo  # noqa: F401 # all that a run would import: once, before processes are forked

    import lockstep.report.plots
    import lockstep.training.elastic  # noqa: F401
    from lockstep.bench.results import append_result, describe_run

    draw = np.random.RandomState(0)
    images = draw.randint(0, 256, (24, 1, 28, 28)).astype(np.uint8)
    data = (images, draw.randint(0, 10, 24)), (images[:6], draw.randint(0, 10, 6))
    wrong, outcomes = [], Counter(dict.fromkeys(OUTCOMES.values(), 0))
    counts: dict[str, Any] = {"engine": options.engine, "calls": 0, "faults": 0}
    with tempfile.TemporaryDirectory() as name:
        killed = Path(name, "killed")
        whole = FileFaults(Path(name, "whole"))
        status, expected = run(Path(name, "whole"), data, options.engine, whole, resume=False)
        assert status == 0, expected
        last = next(n for n, call in enumerate(whole.calls(), 1) if call.startswith("rename") and "06" in call)
        run(killed, data, options.engine, FileFaults(killed, last, errno.EIO), resume=False)  # a worker is replaced
        (killed / "run" / "checkpoints" / ".part-step-000006.safetensors").write_bytes(b"half of it")
        first = Case(options.engine, data, expected)
        parts = {"first": first, "resumed": first._replace(start=killed)}
        for part, case in ((part, parts[part]) for part in options.part.split(",")):
            undisturbed = FileFaults(Path(name, part))
            assert case.run(Path(name, part), undisturbed) == (0, expected)
            calls = undisturbed.calls()
            if options.list:
                print(*calls, sep="\n", file=sys.stderr)
                continue
            first_call, _, last_call = options.calls.partition("-")
            chosen = range(int(first_call), min(int(last_call or len(calls)), len(calls)) + 1, options.every)
            numbers = [options.call] if options.call else chosen
            for number, kind in ((number, kind) for number in numbers for kind in FAULTS):
                outcome, found = case.disturbed(Path(name, f"{part}-{kind}-{number}"), number, kind)
                outcomes[outcome] += 1
                if found is not None:
                    wrong.append({"part": part, **found})
                    print(json.dumps(wrong[-1], indent=2), file=sys.stderr, flush=True)
            counts |= {part: Counter(call.split()[0] for call in calls), "calls": counts["calls"] + len(calls)}
            counts["faults"] += len(numbers) * len(FAULTS)
    figures = {**counts, **outcomes, "wrong": wrong}
    print(json.dumps(figures, indent=2))
    if options.out is not None:
        append_result(options.out, {**describe_run(f"python benchmarks/faults.py {' '.join(sys.argv[1:])}"), **figures})
    return len(wrong)


if __name__ == "__main__":
    sys.exit(bool(main()))
