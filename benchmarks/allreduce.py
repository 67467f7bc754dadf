"""`lockstep.allreduce` against the text's four lines, in one memory: the third exercise, measured. Interleaved rounds.

    python benchmarks/allreduce.py
    python benchmarks/allreduce.py --tensors 4 --megabytes 4 --rounds 100

In one memory all bytes pass through the same bus, whoever adds them: `sharded` can only be as fast as the text's.
Between GPUs every one has a link of its own, which sends and receives at once, and what counts is the busiest. With the
text's, (k - 1) x n bytes come into the first GPU, and after that as many leave it; with `sharded`, (k - 1) / k x n come
and leave at once, twice. The last line that is printed has both.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import lockstep
from lockstep.bench.results import append_result, describe_run
from lockstep.bench.tables import Row, Table

RESULTS = Path(__file__).parent / "results"


def text_allreduce(data: list[torch.Tensor]) -> None:
    """All are sent to the first device and added there; the sum is sent to all."""
    first = data[0]
    for other in data[1:]:
        first[:] += other.to(first.device)
    for other in data[1:]:
        other[:] = first.to(other.device)


def measure(num_tensors: int, megabytes: float, num_rounds: int) -> Table:
    """The seconds of an all-reduce in every way, one for each round."""
    data = [torch.rand(round(megabytes * 1e6 / 4)) for _ in range(num_tensors)]
    ways: dict[str, Callable[[], object]] = {"text": lambda: text_allreduce(data)}
    for exchange in ("gather", "sharded", "tree"):
        ways[exchange] = lambda exchange=exchange: lockstep.allreduce(data, exchange)  # type: ignore[misc]
    rows = {name: Row(name) for name in ways}
    for round_number in range(num_rounds + 1):  # the first warms up
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
            for tensor in data:
                tensor.mul_(1 / num_tensors)  # else the numbers would grow without end
            if round_number:
                rows[name].seconds.append(seconds)
    ratios = {name: median(row.ratios(rows["text"])) for name, row in rows.items()}
    k, one = num_tensors, megabytes
    notes = [
        "time, the text's = 1: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()),
        f"between GPUs, MB one after the other on the busiest link: {2 * (k - 1) * one:g} with the text's and gather, "
        f"{2 * (k - 1) / k * one:g} with sharded",
    ]
    title = f"All-reduce of {num_tensors} tensors of {megabytes:g} MB in one memory, median of {num_rounds} rounds"
    settings = {"tensors": num_tensors, "megabytes": megabytes, "rounds": num_rounds}
    return Table(title, "text", list(rows.values()), unit="all-reduce", notes=notes, settings=settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=40.0, help="of each tensor")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    table = measure(arguments.tensors, arguments.megabytes, arguments.rounds)
    result = describe_run("python benchmarks/allreduce.py", *sys.argv[1:]) | table.to_dict()
    append_result(arguments.out / "allreduce.jsonl", result)
    print(table.text())


if __name__ == "__main__":
    main()
