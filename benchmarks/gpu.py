"""Our step and DistributedDataParallel's on one GPU, one after the other in one process: milliseconds and memory.

    python benchmarks/gpu.py gpt2 --precision bf16 ddp 8 1
    python benchmarks/gpu.py gpt2 --precision bf16 ddp-compiled 8,compile

`8` is our step with 8 shards, `8,compile` the same compiled, `8,eager` without CUDA graphs. (`lockstep bench` takes
turns instead, and needs a GPU with memory for all contenders at once.) Memory is what is reserved, beside the samples,
which all contenders have on the GPU; a contender that follows a larger one can show some of its, so measure memory in a
process of its own. Every run appends a line to benchmarks/results/gpu.jsonl.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lockstep.bench.contenders import ContenderRank
from lockstep.bench.contenders.batches import resident_bytes
from lockstep.bench.contenders.distributed import ddp_best, ddp_compiled
from lockstep.bench.contenders.lockstep import LockstepRun
from lockstep.bench.results import RESULTS, append_result, describe_run
from lockstep.bench.workload import MODELS, Workload, load_samples, workload_for
from lockstep.core.device import Device
from lockstep.runtime.store import serve_store

DDP = {"ddp": ddp_best, "ddp-compiled": ddp_compiled}
RANK = ContenderRank(0, 1, "cuda:0", 0, "")


def started(what: str, workload: Workload, closing: ExitStack) -> Callable[[int], float]:
    """A contender that is warm: a function that runs so many steps, and gives the seconds of one."""
    if what in DDP:
        store, port, _ = serve_store()
        closing.callback(dist.destroy_process_group)
        contender = DDP[what](workload, RANK._replace(store_port=port, store_prefix=what))
        closing.callback(lambda kept=store: None)  # the store serves as long as something refers to it
    else:
        number, *options = what.split(",")
        settings = {"compile": "compile" in options, "capture": "eager" not in options}
        contender = LockstepRun(replace(workload, num_shards=int(number), settings=settings), RANK)
        closing.callback(contender.close)
    contender.prepare()
    print(f"{what}: {contender.warm_up(workload.num_warmup)['chosen']}")

    def run(num_steps: int) -> float:
        done = contender.run(num_steps)
        return float(done["seconds"] / done.get("num_steps", num_steps))

    return run


def main() -> None:
    """Measures what is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("what", nargs="+", help="ddp, ddp-compiled, or a number of shards: 8 or 8,compile")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    workload, _ = workload_for(options.model, [Device("cuda:0")], options.precision)
    num_sample_bytes = resident_bytes(load_samples(workload))
    found: list[dict[str, Any]] = []
    for what in options.what:
        began = time.perf_counter()
        with ExitStack() as closing:
            run = started(what, workload, closing)
            ready = time.perf_counter() - began
            times = [1000 * run(workload.num_steps) for _ in range(options.trials)]
            num_bytes = torch.cuda.max_memory_reserved() - num_sample_bytes
            print(f"{options.model} {options.precision} {what:16} {median(times):8.2f} ms ({min(times):.2f} to "
                  f"{max(times):.2f})  {num_bytes / 2**30:5.2f} GiB  ready in {ready:.0f} s", flush=True)  # fmt: skip
            found.append({"what": what, "milliseconds": times, "bytes_beside_samples": num_bytes})
            del run
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    described = describe_run("python", "benchmarks/gpu.py", *sys.argv[1:])
    append_result(RESULTS / "gpu.jsonl", described | {"model": options.model, "contenders": found})


if __name__ == "__main__":
    main()
