"""How good `lockstep plan` predicts: each model's plan is checked against real steps; appends to results/plan.jsonl.

    python benchmarks/plan.py                            # LeNet, ResNet-18 and the transformer on this machine
    python benchmarks/plan.py resnet18 --shards 2,8      # one of them

Batches are of 256 samples, of ResNet-18 on CPUs 64. Nothing else should run on the machine meanwhile.
"""

import argparse
import sys
import time
from pathlib import Path

from lockstep.analysis.check import checked, summary_of
from lockstep.analysis.plan import PlanOptions, make_plan
from lockstep.analysis.plan_table import as_text
from lockstep.analysis.results import record_of
from lockstep.bench.results import append_result, describe_run
from lockstep.bench.workload import tokens_of
from lockstep.config import RunConfig
from lockstep.data import load_dataset
from lockstep.training.task import UserObjects

RESULTS = Path(__file__).parent / "results" / "plan.jsonl"
MODELS = ("lenet", "resnet18", "transformer")


def log(text: str) -> None:
    """Shows progress."""
    print(text, file=sys.stderr, flush=True)


def check(model: str, given: argparse.Namespace) -> dict[str, object]:
    """The checked plan of a model."""
    batch_size = given.batch_size or (64 if model == "resnet18" and not str(given.devices).startswith("cuda") else 256)
    settings = {"model": model, "data": "fashion-mnist-mini", "batch_size": batch_size, "devices": given.devices}
    config = RunConfig(**settings, learning_rate=0.01, capture=not given.no_capture)
    objects = None
    if model == "transformer":
        data = load_dataset(config.data, None, lambda *progress: None)
        objects = UserObjects(data=(tokens_of(data.X_train), tokens_of(data.X_test)))
    asked = PlanOptions(shards=given.shards, splits=tuple(given.splits.split(",")), seconds=given.measure_seconds)
    began = time.perf_counter()
    plan, loaded = make_plan(config, objects, asked, log)
    seconds = time.perf_counter() - began
    plan = checked(plan, config, loaded, log, given.seconds)
    print(as_text(plan))
    print(f"{summary_of(plan).sentence()}; the plan took {seconds:.0f} s", flush=True)
    return {**record_of(plan), "plan_seconds": round(seconds, 1), "captures": config.capture}


def main() -> None:
    """Checks the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--shards", default="8,2,4,16")
    parser.add_argument("--splits", default="data,network")
    parser.add_argument("--devices", help="like 2, or cuda:0; default: all")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--measure-seconds", type=float, default=40.0, help="to measure each model for, about")
    parser.add_argument("--seconds", type=float, default=100.0, help="to check each model for, about")
    parser.add_argument("--no-capture", action="store_true")
    given = parser.parse_args()
    for model in given.models:
        found = check(model, given)
        append_result(RESULTS, {**describe_run("python", *sys.argv), **found})


if __name__ == "__main__":
    main()
