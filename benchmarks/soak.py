"""A soak: short runs, one after the other, with faults at random moments. Each has to end with the hash of its kind.

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --faults 1000
    python benchmarks/soak.py --minutes 5 --seed 7 --continue   # goes on where the last one with this seed ended
    python benchmarks/soak.py --seed 7 --total                  # the figures of all of these together
    python benchmarks/soak.py --seed 7 --run 12   # one run again: the same choices, though not the same moments

A run is attempted, disturbed (`soak_faults.py`: kills, stops, interrupts, full disks, failing calls, flipped bits,
damaged checkpoints), and resumed with other devices, engine, exchange and split until it has had its faults and is
done. It prints runs, faults, equal hashes, processes left behind and tracebacks, and appends them to
results/soak.jsonl. Everything of a run that failed is kept: its folder, commands, faults and output.
"""

import argparse
import json
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from file_faults import forget_library, preload
from soak_command import Command, members_of
from soak_faults import DAMAGE, FAULTS, NotFound, damage_checkpoint, send

RESULTS = Path(__file__).parent / "results" / "soak.jsonl"
LIMIT_SECONDS, ORPHAN_SECONDS = 180, 10  # for one attempt to end; for its processes to be gone then
DATA = ["--data", "fashion-mnist-mini", "--epochs", "5", "--batch-size", "200"]
KINDS = {  # what is trained: one hash each
    "mlp": [*DATA, "--model", "mlp", "--lr", "0.05", "--momentum", "0.9"],
    "lenet": [*DATA, "--model", "lenet", "--lr", "0.1"],
    "adam": [*DATA, "--model", "mlp", "--optimizer", "adam"],
    "slices": [*DATA, "--model", "lenet", "--lr", "0.1", "--slices", "4"],
}
SPLITS = {  # name -> how often it is drawn, and the numbers of devices
    "data": (5, ["1", "2", "2", "3", "4"]),
    "network": (1, ["2", "3"]),
    "data=2,network=2": (1, ["4"]),
}
SLICED_SPLITS = {**SPLITS, "layers": (1, ["2", "4"]), "data=2,layers=2": (1, ["4"]), "network=2,layers=2": (1, ["4"])}
VARIED = {  # drawn anew for every attempt: the hash must not depend on them
    "--engine": ["inprocess", "processes", "processes"],
    "--exchange": ["sharded", "gather", "tree"],
    "--bucket-mb": ["0", "0.05"],
    "--balance": ["equal", "measured"],
    "--checkpoint-every": ["2", "5"],
    "--check-every": ["1", "7"],
    "--verify-every": ["0", "3"],
    "--max-restarts": ["1", "20"],
    "heals": ["--heal", "--no-heal"],  # a flag
}


class Run:
    """One run, from its first attempt to its hash. All that is random about it comes from `seed` and `number`."""

    def __init__(self, place: Path, seed: int, number: int) -> None:
        self._draw = random.Random(f"{seed} {number}")
        self.number, self.folder, self._place = number, place / "run", place
        self.kind = self._draw.choice(list(KINDS))
        self._num_planned = self._draw.randint(4, 16)
        self.counts: Counter[str] = Counter()  # faults, by name
        self.history: list[dict[str, Any]] = []  # attempts: command, faults, how it ended
        self.problems: list[str] = []
        self.num_orphans = self.num_tracebacks = 0

    def finish(self, expected: str) -> str:
        """Attempts, disturbs and resumes it until it is done; its hash, empty where it has none."""
        for number in range(4 * self._num_planned + 4):
            command = self._attempt(number)
            self._check(command)
            if command.status == 0:
                found = _hash_in(command.output.with_suffix(".out").read_text())
                if found != expected:
                    self.problems.append(f"attempt {number} has the hash {found}, and not {expected}")
                return found
            if len(self.problems) > 3:
                break
        self.problems.append("it was never done")
        return ""

    def _attempt(self, number: int) -> Command:
        """An attempt that has ended: by itself, or by the faults."""
        draw, faults = self._draw, list[str]()
        if number and self.counts.total() < self._num_planned and draw.random() < 0.15:
            self._count(DAMAGE, damage_checkpoint(self.folder, draw), faults)
        varied = {**drawn_split(draw, self.kind), **{name: draw.choice(values) for name, values in VARIED.items()}}
        if not holds_all(varied, self.kind):  # what needs every device to hold the whole model
            varied |= {"--balance": "equal", "heals": "--no-heal"}
        chosen = [part for pair in varied.items() for part in pair if part != "heals"]
        drops = "processes" in chosen and draw.random() < 0.5
        chosen += ["--on-hang", "drop", "--timeout", "3"] if drops else ["--on-hang", "stop", "--timeout", "60"]
        arguments = [*KINDS[self.kind], *chosen, "--out", str(self.folder), "--resume", "--json"]
        command = Command(self.folder, arguments, self._place / f"attempt-{number}")
        self.history.append({"command": " ".join(["lockstep train", *arguments]), "faults": faults})
        left_out = {} if drops else {"stop for good"}
        if not holds_all(varied, self.kind):  # nobody has the same part, to compare a flipped bit with
            left_out = {*left_out, "flipped bit"}
        names = [name for name in FAULTS if name not in left_out]
        weights = [FAULTS[name][1] for name in names]
        command.wait(draw.expovariate(1 / 0.8))
        while self.counts.total() < self._num_planned and not command.is_over():
            name = draw.choices(names, weights)[0]
            try:
                self._count(name, FAULTS[name][0](command, draw), faults)
            except NotFound as problem:
                self.problems.append(f"attempt {number}: {problem}")
            command.wait(draw.expovariate(1 / 0.5))
        if not command.wait(LIMIT_SECONDS):
            self.problems.append(f"attempt {number} hangs")
            for process in (command.process, *command.workers()):
                send(process, signal.SIGQUIT)
            time.sleep(1)
            for process in members_of(command.process):
                send(process, signal.SIGKILL)
            command.wait(10)
        self.history[-1]["status"] = command.status
        return command

    def _count(self, name: str, is_reached: bool, faults: list[str]) -> None:
        if is_reached:
            self.counts[name] += 1
            faults.append(f"{time.strftime('%H:%M:%S')} {name}")

    def _check(self, command: Command) -> None:
        """Nothing may be left of an attempt, and it ends in words that are for the user, unless it was killed."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := members_of(command.process)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in left:
            self.problems.append(f"process {process} was left behind by {command.output.name}")
            send(process, signal.SIGKILL)
        self.num_orphans += len(left)
        said = command.output.with_suffix(".err").read_text(errors="replace")
        if re.search(r"Traceback|Exception ignored|Fatal Python error", said):
            self.num_tracebacks += 1
            self.problems.append(f"a traceback in {command.output.name}.err")
        allowed = {0, 1, 130, -signal.SIGKILL, -signal.SIGTERM}
        if command.faults.num_failed:  # a folder that cannot be used is refused before anything is written
            allowed.add(2)
        if command.status not in allowed:
            self.problems.append(f"{command.output.name} ended with {command.status}: {said[-300:]}")
        if command.status in (1, 2, 130) and not re.search("^lockstep: ", said, re.MULTILINE):
            self.problems.append(f"{command.output.name} ended with {command.status}, without a sentence")


def drawn_split(draw: random.Random, kind: str) -> dict[str, str]:
    """How the work is split among which number of devices."""
    splits = SLICED_SPLITS if kind == "slices" else SPLITS
    split = draw.choices(list(splits), [weight for weight, _ in splits.values()])[0]
    return {
        "--devices": draw.choice(splits[split][1]),
        "--split": split,
        "--update": draw.choice(["replicated", "replicated", "sharded"]),
    }


def holds_all(varied: dict[str, Any], kind: str) -> bool:
    """Whether every device holds and updates the whole model."""
    return kind != "slices" and varied["--split"] == "data" and varied["--update"] == "replicated"


def _hash_in(out: str) -> str:
    found = re.search(r'"weights_sha256": "(\w+)"', out)
    return found[1] if found else ""


def expected_hashes(place: Path) -> dict[str, str]:
    """The hash of each kind, from a run that nobody disturbs, on one device."""
    found = {}
    for kind, arguments in KINDS.items():
        command = Command(
            place / kind, [*arguments, "--devices", "1", "--json", "--out", str(place / kind)], place / kind
        )
        command.wait(LIMIT_SECONDS)
        assert command.status == 0, place / kind
        found[kind] = _hash_in((place / f"{kind}.out").read_text())
    return found


def kept(run: Run, place: Path, seed: int) -> Path:
    """Where the run is kept, with what it takes to repeat it."""
    target = Path("runs") / f"soak-{seed}-{run.number}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(place, target)
    again = f"python benchmarks/soak.py --seed {seed} --run {run.number}"
    story = {"again": again, "kind": run.kind, "problems": run.problems, "attempts": run.history}
    (target / "story.json").write_text(json.dumps(story, indent=2))
    return target


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    total: Counter[str] = Counter({"runs": 0, "attempts": 0, "equal hashes": 0, "orphans": 0, "tracebacks": 0})
    faults: Counter[str] = Counter()
    began, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as name:
        expected = expected_hashes(Path(name))
        number = options.run or (soaked(options)["runs"] if options.goes_on else 0)
        while True:
            place = Path(name, "place")
            place.mkdir()
            run = Run(place, options.seed, number)
            found = run.finish(expected[run.kind])
            faults += run.counts
            total.update(runs=1, attempts=len(run.history), orphans=run.num_orphans, tracebacks=run.num_tracebacks)
            total["equal hashes"] += found == expected[run.kind]
            if run.problems:
                failed.append({"run": number, "kept": str(kept(run, place, options.seed)), "problems": run.problems})
                print(json.dumps(failed[-1]), file=sys.stderr, flush=True)
            shutil.rmtree(place)
            seconds, number = time.monotonic() - began, number + 1
            print(
                f"\r{total['runs']} runs, {faults.total()} faults, {len(failed)} failed, {seconds:.0f} s ",
                end="",
                flush=True,
            )
            is_enough = faults.total() >= options.faults or seconds >= 60 * options.minutes
            if is_enough or options.run is not None:
                break
    print()
    return {**total, "faults": faults.total(), "by kind": dict(faults), "seconds": round(seconds), "failed": failed}


def soaked(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all soaks with this seed, of which each began where the one before had ended."""
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    found = [record for record in map(json.loads, lines) if record["seed"] == options.seed]
    names = ("runs", "attempts", "equal hashes", "orphans", "tracebacks", "faults", "seconds")
    kinds: Counter[str] = Counter()
    for record in found:
        kinds.update(record["by kind"])
    failed = [each for record in found for each in record["failed"]]
    return {**{name: sum(record[name] for record in found) for name in names}, "by kind": kinds, "failed": failed}


def main() -> int:
    """Prints and keeps the figures; the number of runs that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most; 30 unless --faults is given")
    parser.add_argument("--faults", type=float, default=math.inf, help="until there were so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, help="only this one")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="after the last soak with this seed")
    parser.add_argument("--total", action="store_true", help="only show the figures of all soaks with this seed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures are appended")
    options = parser.parse_args()
    if options.total:
        print(json.dumps(soaked(options), indent=2))
        return 0
    if options.minutes == options.faults:
        options.minutes = 30.0
    preload()
    forget_library()
    import torch._dynamo  # noqa: F401 # all that a run would import: once, before processes are forked

    import lockstep.api
    import lockstep.cli
    import lockstep.report.plots
    import lockstep.training.elastic
    import lockstep.training.module_task  # noqa: F401
    from lockstep.bench.results import append_result, describe_run

    figures = soak(options)
    print(json.dumps(figures, indent=2))
    command = f"python benchmarks/soak.py {' '.join(sys.argv[1:])}"
    if options.run is None:
        append_result(options.out, {**describe_run(command), "seed": options.seed, **figures})
    return len(figures["failed"])


if __name__ == "__main__":
    sys.exit(bool(main()))
