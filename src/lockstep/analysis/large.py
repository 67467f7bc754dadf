"""Steps of very many devices: ranks that do the same are simulated once, and their exchange is a formula.

All copies of the model do the same, so one of them with the most shards is put on the clock by itself. The exchange
that follows is `sharded`: every rank sends each of the others its chunk of every node, adds what it got, and sends the
total of its chunk to all. A link takes one message at a time, so with n bytes and k copies a rank's link is busy for
2 (k-1)/k n / bandwidth; the latency counts once for each of the two rounds.
"""

import math

from lockstep.analysis.step_costs import Configuration, Hardware, PlannedStep
from lockstep.schedules.clock import EXCHANGE, run_on_clock
from lockstep.schedules.reduction_tree import maximal_nodes

MAX_SHARDS_ON_CLOCK = 256  # of one copy of the model, times the parts that it is in


def large_step(step: PlannedStep) -> tuple[float, dict[str, float]]:
    """The time of a step, and what an average device does in it."""
    configuration, grid = step.configuration, step.configuration.grid
    ranges = step.shard_ranges()
    slowest = max(range(grid.data), key=lambda copy: len(ranges[copy]) / step.hardware_of.speed(copy))
    own = ranges[slowest]
    one = PlannedStep(step.profile, _one_copy(configuration), _only(step, slowest))
    seconds, totals = _of_copy(one, [step.sizes[shard] for shard in own])
    if grid.data == 1:
        return seconds, totals
    link, number = step.link(0), grid.data
    entries = max([stage.num_entries for stage in step.stages] or [step.profile.num_entries]) / grid.layers
    num_nodes = max(len(maximal_nodes(own, len(step.sizes))) for own in ranges if own)
    chunk = 4 * entries / number
    sent = (number - 1) * chunk * (num_nodes + 1) / link.bandwidth + 2 * link.latency
    added = step.add(slowest, math.ceil(entries / number)) * (number * num_nodes - 1)
    totals[EXCHANGE] = totals.get(EXCHANGE, 0.0) + sent + added
    return seconds + sent + added, totals


def _of_copy(one: PlannedStep, sizes: list[int]) -> tuple[float, dict[str, float]]:
    """One copy of the model by itself. Of very many shards, each costs what one more costs after some."""
    few = max(MAX_SHARDS_ON_CLOCK // one.configuration.grid.num_parts, 4 * one.configuration.grid.network)
    if len(sizes) <= few:
        one.sizes = sizes
        clocked = run_on_clock(one.schedule(), one)
        return clocked.seconds, clocked.totals()
    (less, of_less), (more, of_more) = (_of_copy(one, _some(sizes, number)) for number in (few // 2, few))
    times = (len(sizes) - few) / (few - few // 2)
    totals = {kind: value + times * (value - of_less.get(kind, 0.0)) for kind, value in of_more.items()}
    return more + times * (more - less), totals


def _some(sizes: list[int], number: int) -> list[int]:
    """So many of the sizes, as many of each as there are in all."""
    return [sizes[at * len(sizes) // number] for at in range(number)]


def _one_copy(configuration: Configuration) -> Configuration:
    return configuration._replace(grid=configuration.grid._replace(data=1), shards_update=False, is_balanced=False)


def _only(step: PlannedStep, copy: int) -> Hardware:
    parts, hardware = step.configuration.grid.num_parts, step.hardware_of
    if len(hardware.speeds) == 1:
        return hardware
    return hardware._replace(speeds=hardware.speeds[copy * parts : (copy + 1) * parts])
