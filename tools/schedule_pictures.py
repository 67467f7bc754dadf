"""Writes the pictures of docs/splits.md, or one picture of any schedule.

    python tools/schedule_pictures.py                  # all pictures in docs/
    python tools/schedule_pictures.py --check          # whether they are up to date
    python tools/schedule_pictures.py network=3 --pipeline 1f1b --shards 8 > picture.svg
    python tools/schedule_pictures.py network=2 --places 0,1,0 --times 0.5,1,0.5      # there and back

A shard takes 1 second to go forward through a stage and 2 to come back; see --forward and --backward.
"""

import argparse
import sys
from pathlib import Path

from lockstep.parallel.combined import ModelSplit, StageShape, combined
from lockstep.partition.grid import grid_for, num_devices_of
from lockstep.partition.ranks import split_over_ranks
from lockstep.report.schedule_picture import draw_schedule
from lockstep.schedules.instructions import Schedule
from lockstep.schedules.pipeline_orders import ORDERS
from lockstep.schedules.timeline import Costs, timeline

DOCS = Path(__file__).parent.parent / "docs"
PICTURES = {  # the whole network takes 2 and 4 seconds, on whichever devices
    "split-none.svg": "data=1 --forward 2 --backward 4",
    "split-data.svg": "data=2 --forward 2 --backward 4",
    "split-network.svg": "network=2",
    "split-layers.svg": "layers=2",
    "split-data-network.svg": "data=2,network=2",
    "split-1f1b.svg": "network=3",
    "split-gpipe.svg": "network=3 --pipeline gpipe",
    "split-there-and-back.svg": "network=2 --places 0,1,0 --times 0.5,1,0.5",
}


def schedule_of(split: str, shards: int, order: str, places: tuple[int, ...] | None) -> Schedule:
    """The schedule of a split with so many shards; `places` says who has which stage."""
    num_devices = num_devices_of(split)
    if num_devices is None:
        raise SystemExit(f"{split}: say how many devices, like {split}=2.")
    grid = grid_for(split, num_devices)
    stages = places or tuple(range(grid.network))
    own = [[stage for stage, place in enumerate(stages) if place == at] for at in range(grid.network)]
    parts = tuple(
        tuple(StageShape(stage, range(8 * number, 8 * number + 8)) for number, stage in enumerate(own[part]))
        for part in (part // grid.layers for part in range(grid.num_parts))
    )
    split_of = ModelSplit(grid, stages, parts, order, gathers_norms=False)
    return combined(split_of.step(tuple(split_over_ranks(shards, grid.data)), "sharded", together=False))


def picture(arguments: list[str]) -> str:
    """The SVG of a schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", help="like network=3, or data=2,network=2")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--pipeline", choices=ORDERS, default="1f1b")
    parser.add_argument("--places", help="for each stage, its device in a pipeline, like 0,1,0")
    parser.add_argument("--times", help="how many times as long each stage takes, like 0.5,1,0.5")
    parser.add_argument("--forward", type=float, default=1)
    parser.add_argument("--backward", type=float, default=2)
    given = parser.parse_args(arguments)
    places = tuple(map(int, given.places.split(","))) if given.places else None
    schedule = schedule_of(given.split, given.shards, given.pipeline, places)
    times = tuple(map(float, given.times.split(","))) if given.times else ()
    boxes = timeline(schedule, Costs(given.forward, given.backward, stages=times))
    order = f", {given.pipeline}" if "network" in given.split else ""
    back = ", there and back" if places else ""
    return draw_schedule(boxes, f"--split {given.split}{order}{back}, {given.shards} shards")


def main(arguments: list[str]) -> int:
    if arguments and arguments != ["--check"]:
        sys.stdout.write(picture(arguments))
        return 0
    stale = 0
    for name, said in PICTURES.items():
        path, made = DOCS / name, picture(said.split())
        if not arguments:
            path.write_text(made, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != made:
            stale += 1
            print(f"docs/{name} is not up to date: run python tools/schedule_pictures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
