"""A configuration on the clock: time, memory, and what limits it."""

from dataclasses import replace

import pytest

from lockstep.analysis.curves import curve_of
from lockstep.analysis.large import large_step
from lockstep.analysis.loading import Loading
from lockstep.analysis.step_costs import Configuration, Hardware, PlannedStep, predict
from lockstep.partition.grid import Grid
from lockstep.schedules.clock import Link

ALONE = Hardware(is_shared=False)


def seconds(profile, grid, shards=8, hardware=None, **more):
    return predict(profile, Configuration(grid, shards, **more), hardware or Hardware()).seconds


def test_one_device_takes_its_samples_and_two_slow_each_other_down(profile):
    assert seconds(profile, Grid(1)) == pytest.approx(0.64)
    assert seconds(profile, Grid(2)) == pytest.approx(0.32 * 1.1)
    assert seconds(profile, Grid(2), hardware=ALONE) == pytest.approx(0.32)


def test_what_the_host_needs_is_added(profile):
    slow = replace(profile, step=curve_of([(1, 0.1), (2, 0.2)]))
    assert seconds(slow, Grid(1)) == pytest.approx(0.74)
    assert seconds(slow, Grid(2)) == pytest.approx(0.32 * 1.1 + 0.2)


@pytest.mark.parametrize("shards", [1, 4, 8, 16])
def test_a_step_of_a_gpu_takes_what_a_whole_one_took_and_not_its_instructions_one_by_one(profile, shards):
    costly = replace(profile, add=1e-6, update=2e-6, step=curve_of([(1, 0.01)]))
    captured = replace(costly, whole_steps=curve_of([(1, 0.05), (4, 0.06), (16, 0.1)]))
    assert seconds(captured, Grid(1), shards) == pytest.approx(captured.whole_steps.at(shards))
    assert seconds(captured, Grid(2), 16, ALONE) == pytest.approx(0.1 / seconds(costly, Grid(1), 16) * seconds(
        costly, Grid(2), 16, ALONE))  # fmt: skip
    split = Grid(network=2), shards, ALONE  # its steps are not captured
    assert seconds(captured, *split, starts=("layer2",)) == seconds(costly, *split, starts=("layer2",))


def test_steps_of_devices_at_hand_are_corrected_by_whole_ones(profile):
    known = replace(profile, corrections={(2, "data"): curve_of([(2, 1.1), (8, 1.4)])})
    for shards, times in ((2, 1.1), (5, 1.25), (8, 1.4), (16, 1.4)):  # beyond what was measured, the last one's
        assert seconds(known, Grid(2), shards) == pytest.approx(times * seconds(profile, Grid(2), shards))
    assert seconds(known, Grid(4)) == pytest.approx(1.4 * seconds(profile, Grid(4)))  # nothing nearer was measured
    same = [(Grid(1), {}), (Grid(2), {"hardware": ALONE}), (Grid(network=2), {"starts": ("layer2",)})]
    for grid, how in same:
        assert seconds(known, grid, **how) == seconds(profile, grid, **how)
    parts = predict(known, Configuration(Grid(2), 8), Hardware()).parts
    assert sum(parts.values()) == pytest.approx(seconds(known, Grid(2)))


def test_a_pipeline_is_idle_at_both_ends(profile):
    found = seconds(profile, Grid(network=2), hardware=ALONE, starts=("layer2",))
    assert found == pytest.approx(0.32 * (8 + 1) / 8)
    uneven = seconds(profile, Grid(network=2), hardware=ALONE, starts=("layer1",))
    assert uneven > found


def test_faster_devices_get_more_shards_where_they_may(profile):
    uneven = Hardware(speeds=(3.0, 1.0), is_shared=False)
    assert seconds(profile, Grid(2), hardware=uneven) == pytest.approx(0.32)  # the slow one has half
    assert seconds(profile, Grid(2), hardware=uneven, is_balanced=True) == pytest.approx(0.16)


def test_layers_in_slices_wait_for_the_link(profile):
    near = seconds(profile, Grid(layers=2), hardware=Hardware(link=Link(), is_shared=False))
    far = seconds(profile, Grid(layers=2), hardware=Hardware(link=Link(latency=0.001), is_shared=False))
    assert far == pytest.approx(near + 8 * 8 * 0.001 + 0.001)  # eight shards, eight collectives each; and the results


@pytest.mark.parametrize(
    ("grid", "hardware", "limit"),
    [
        (Grid(1), ALONE, "compute"),
        (Grid(2), Hardware(link=Link(bandwidth=1e3), is_shared=False), "exchange"),
        (Grid(network=4), ALONE, "bubble"),
    ],
)
def test_the_largest_part_of_the_time_is_the_limit(profile, grid, hardware, limit):
    starts = ("layer1", "layer2", "layer3") if grid.network > 1 else ()
    shards = 1 if grid.network > 1 else 8
    assert predict(profile, Configuration(grid, shards, starts), hardware).limited_by == limit


def test_slow_loading_and_tiny_shards_are_limits(profile):
    slow = replace(profile, loading=Loading(0.05, num_workers=1, ahead=8))
    found = predict(slow, Configuration(Grid(1), 8), ALONE)
    assert found.limited_by == "loading"
    assert found.seconds == pytest.approx(64 * 0.05)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    tiny = replace(profile, whole=curve_of([(1, 0.1), (64, 0.1)]))
    assert predict(tiny, Configuration(Grid(1), 8), ALONE).limited_by == "launch"


def test_cores_that_load_samples_do_not_compute(profile):
    busy = replace(profile, loading=Loading(0.01, busy=0.01, num_workers=2, ahead=8, num_cores=2))
    together, alone = (predict(busy, Configuration(Grid(2), 8), hardware) for hardware in (Hardware(), ALONE))
    assert together.seconds == pytest.approx((0.64 * 1.1 + 0.64) / 2)  # the work of all, on two cores
    assert together.limited_by == "loading"
    assert alone.seconds == pytest.approx(0.32)  # devices of their own


def test_memory_is_less_where_the_model_is_split(profile):
    def memory(grid, shards=8, **more):
        return PlannedStep(profile, Configuration(grid, shards, **more), ALONE).memory_bytes()

    whole = memory(Grid(2))
    assert memory(Grid(network=2), starts=("layer2",)) < whole
    assert memory(Grid(layers=2)) < whole
    assert memory(Grid(2), shards_update=True) == whole - 4000
    assert memory(Grid(2), shards=2) > whole  # larger shards keep more


@pytest.mark.parametrize("number", [8, 32])
def test_the_formula_for_many_devices_agrees_with_the_clock(profile, number):
    hardware = Hardware(link=Link(latency=1e-4, bandwidth=1e6), is_shared=False)
    step = PlannedStep(profile, Configuration(Grid(number), 64), hardware)
    assert large_step(step)[0] == pytest.approx(step.clocked().seconds, rel=0.02)


def test_very_many_shards_are_extrapolated(profile):
    many = replace(profile, batch_size=4096)
    configuration = Configuration(Grid(network=2), 1000, ("layer2",))
    step = PlannedStep(many, configuration, ALONE)
    assert large_step(step)[0] == pytest.approx(step.clocked().seconds, rel=0.01)


def test_thousands_of_devices_take_a_moment(profile):
    many = replace(profile, batch_size=4096)
    hardware = Hardware(link=Link(latency=1e-5, bandwidth=25e9), is_shared=False)
    found = seconds(many, Grid(4096), shards=4096, hardware=hardware)
    assert 0.01 < found < 0.02
