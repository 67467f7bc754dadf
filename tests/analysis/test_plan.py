"""The rows of a plan, which of them is recommended, and what is said about it."""

import json
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import lockstep
from lockstep.analysis import whole_steps
from lockstep.analysis.candidates import configurations, device_numbers, grids
from lockstep.analysis.check import summary_of
from lockstep.analysis.curves import curve_of
from lockstep.analysis.plan import PlanInput, PlanOptions, hardware_of, plan_of, shard_numbers
from lockstep.analysis.plan_table import as_text
from lockstep.analysis.step_costs import Hardware
from lockstep.analysis.whole_steps import Corrections
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.core.errors import ConfigError, Interrupted, OutOfMemory
from lockstep.schedules.clock import Link

ALONE = Hardware(is_shared=False)


def plan(profile, hardware=ALONE, max_devices=4, shards=(1, 2, 4, 8), **settings):
    return plan_of(RunConfig(batch_size=64, **settings), profile, hardware, PlanInput(max_devices, shards))


def test_every_split_of_every_number_of_devices_is_there(profile):
    found = {(row.configuration.num_devices, row.split) for row in plan(profile).rows}
    assert {(1, "data"), (2, "data"), (2, "network"), (2, "layers"), (4, "data=2,network=2")} <= found
    assert (4, "network=2,layers=2") in found
    assert all(row.configuration.grid.data <= row.configuration.num_shards for row in plan(profile).rows)


def test_the_fastest_with_the_weights_of_the_run_is_recommended(profile):
    found = plan(profile)
    assert found.recommended.is_same_run
    assert found.recommended.configuration.num_shards == 8
    assert found.recommended.predicted_ms == min(row.predicted_ms for row in found.rows if row.is_same_run)
    assert found.recommended.command == "lockstep train --devices 4 --batch-size 64 --shards 8"


def test_one_device_is_best_where_others_bring_nothing(profile):
    found = plan(profile, Hardware(link=Link(latency=1.0, bandwidth=1e3), is_shared=False))
    assert found.recommended.configuration.num_devices == 1
    assert "one device is best" in found.notes
    assert "one device is best" in as_text(found)


def test_another_number_of_shards_is_mentioned_but_never_chosen(profile):
    launch_bound = replace(profile, whole=curve_of([(1, 0.1), (64, 0.11)]), together={})
    found = plan(launch_bound)
    assert found.recommended.configuration.num_shards == 8
    assert any("--shards" in note and "other weights" in note for note in found.notes)


def test_a_plan_as_json_has_the_names_of_the_contract(profile):
    plain = json.loads(json.dumps(plan(profile).plain()))
    assert set(plain) == {"configurations", "recommended"}
    names = {"devices", "split", "shards", "predicted_ms", "memory_bytes", "limited_by", "command"}
    assert all(set(row) == names for row in [*plain["configurations"], plain["recommended"]])
    assert plain["recommended"] in plain["configurations"]


@pytest.mark.parametrize("is_checked", [False, True])
def test_the_table_fits_and_marks_what_changes_the_weights(profile, is_checked):
    found = plan(profile, max_devices=8)
    if is_checked:
        rows = tuple(row._replace(measured_ms=row.predicted_ms, error=-0.123) for row in found.rows)
        found = replace(found, rows=rows)
    for width in (80, 100, 120):
        lines = as_text(found, width, has_all=True).splitlines()
        assert max(map(len, lines)) <= width
        assert "* other weights: the number of shards, and slices, are part of the run." in lines
    (marked,) = [line for line in lines if line.startswith("->")]
    assert marked.split()[1:4] == ["8", "data", "8"]
    assert "data=2, network=2, layers=2" in "\n".join(lines)
    assert "\x1b[1m" in as_text(found, 80, is_styled=True)  # bold
    assert "\x1b" not in as_text(found)


def test_a_command_is_never_wrapped(profile):
    found = replace(plan(profile), notes=("a note " * 30, "or this:\n  lockstep train " + "--long " * 30))
    lines = as_text(found, 80).splitlines()
    assert [len(line) > 80 for line in lines] == [line.startswith("  lockstep train --long") for line in lines]


def test_a_pipe_gets_all_rows(profile):
    found = plan(profile, max_devices=16, shards=(2, 4, 8, 16))
    assert sum("compute" in line or "bubble" in line for line in as_text(found, 160, has_all=True).splitlines()) == len(
        found.rows
    )


def test_a_plan_for_many_devices_is_cut_short_on_the_terminal(profile):
    found = plan(profile, max_devices=16, shards=(2, 4, 8, 16))
    assert len(found.rows) > 40
    assert len(as_text(found).splitlines()) < 45


def test_cuts_follow_the_speed_of_devices(profile):
    uneven = Hardware(speeds=(3.0, 1.0), is_shared=False)
    (row,) = [row for row in plan(profile, uneven, 2, (8,)).rows if row.split == "network"]
    assert row.configuration.starts == ("layer3",)
    assert "--stages layer3" in row.command
    (data,) = [row for row in plan(profile, uneven, 2, (8,)).rows if row.split == "data" and row.speedup != 1]
    assert "--balance measured" in data.command


def test_the_settings_of_the_run_are_in_its_command(profile):
    found = plan(profile, optimizer="adamw", learning_rate=0.01, precision="bf16", capture=False)
    assert "--lr 0.01 --optimizer adamw" in found.recommended.command
    assert "--precision bf16" in found.recommended.command
    assert "--no-capture" in found.recommended.command


def test_errors_and_the_order_are_summed_up(profile):
    found = plan(profile, max_devices=2, shards=(8,))
    first, second, *_ = found.rows
    measured = [first._replace(measured_ms=600.0, error=0.05), second._replace(measured_ms=900.0, error=-0.1)]
    summary = summary_of(replace(found, rows=tuple(measured)))
    assert summary == (pytest.approx(0.075), 0.1, 1, 1)
    assert "1 of 1 pairs" in summary.sentence()
    assert "+5 %" in as_text(replace(found, rows=tuple(measured)))


SMALL = Hardware(is_shared=False, memories=(40_000.0,))  # bytes of a device: the whole model needs 64,000 with 8 shards


def test_what_does_not_fit_is_marked_and_never_recommended(profile):
    found = plan(profile, SMALL)
    too_large = [row for row in found.rows if not row.fits]
    assert {row.limited_by for row in too_large} == {"memory"}
    assert {row.split for row in too_large if row.configuration.num_shards == 8} >= {"data"}
    assert all((row.memory_bytes > 40_000) != row.fits for row in found.rows)
    assert found.recommended.fits
    assert found.recommended.split == "network"
    assert "memory" in as_text(found)


def test_the_network_is_cut_where_it_fits(profile):
    uneven = Hardware(is_shared=False, memories=(1e6, 22_000.0))
    fits = {row.configuration.starts for row in plan(profile, uneven, 2, (8,)).rows if row.split == "network"}
    whole = {row.configuration.starts for row in plan(profile, ALONE, 2, (8,)).rows if row.split == "network"}
    assert (fits, whole) == ({("layer3",)}, {("layer2",)})


def test_other_shards_are_recommended_only_where_the_runs_own_do_not_fit(profile):
    found = plan(profile, Hardware(is_shared=False, memories=(70_000.0,)), 1, (2, 8), num_shards=2)
    assert found.recommended.configuration.num_shards == 8
    assert any("other weights" in note for note in found.notes)


def test_where_nothing_fits_a_sentence_says_what_is_missing(profile):
    with pytest.raises(ConfigError, match=r"Nothing fits .* the least that one needs is .* kB, with 4 devices"):
        plan(profile, Hardware(is_shared=False, memories=(1000.0,)))


def test_logical_devices_share_the_memory_of_their_machine(profile):
    shared = Hardware(shared_memory=100_000.0)
    assert (shared.memory(0, 1), shared.memory(1, 4)) == (100_000, 25_000)
    data = [row for row in plan(profile, shared, shards=(8,)).rows if row.split == "data"]
    assert [row.fits for row in data] == [True, False, False, False]  # half of it is too little


def test_numbers_of_devices_and_grids():
    assert device_numbers(3) == [1, 2, 3]
    assert device_numbers(4096)[-2:] == [2048, 4096]
    assert [str(grid) for grid in grids(2, 1, 1)] == ["data=2"]


def test_a_network_that_cannot_be_cut_has_no_stages(profile):
    plain = replace(profile, layers=(), sliced=None)
    found = configurations(plain, RunConfig(batch_size=64), [1, 2], [8], ALONE)
    assert {str(one.grid) for one in found} == {"data=1", "data=2"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"link": "fast"}, "--link fast cannot be read"),
        ({"link": "0GB/s"}, "the bandwidth must be more than 0"),
        ({"link": "-5GB/s,1us"}, "the bandwidth must be more than 0"),
        ({"link": "25GB/s,-1us"}, "the latency at least 0"),
        ({"link": "infGB/s"}, "cannot be read"),
        ({"device_speed": "quick"}, "cannot be read"),
        ({"device_speed": "1,0"}, "must be more than 0"),
        ({"device_speed": "1,-1"}, "must be more than 0"),
        ({"device_speed": "nan"}, "must be more than 0"),
        ({"device_memory": "much"}, "--device-memory much cannot be read"),
        ({"device_memory": "16"}, "cannot be read"),
        ({"device_memory": "0GB"}, "must be more than 0"),
        ({"device_memory": "-4GB"}, "must be more than 0"),
        ({"device_memory": "1e999GB"}, "must be more than 0"),
        ({"device_memory": "1.2.3GB"}, "cannot be read"),
        ({"device_memory": "1GB,,1GB"}, "cannot be read"),
        ({"device_memory": "1GB,1GB,1GB"}, "has 3 numbers, and the plan is for up to 2"),
        ({"device_speed": "1,1,1"}, "has 3 numbers, and the plan is for up to 2"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        hardware_of(PlanOptions(**options), 2, [Device("cpu:0"), Device("cpu:1")])


@pytest.mark.parametrize("text", ["0", "x", "8,", "65", "-1"])
def test_numbers_of_shards_have_to_fit(text):
    with pytest.raises(ConfigError, match="--shards"):
        shard_numbers(text, RunConfig(batch_size=64))


def test_a_model_of_the_users_own_is_measured_and_checked():
    X, y = np.zeros((32, 8), np.float32), np.zeros(32, np.int64)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    found = lockstep.plan(
        2, model=model, data=(X, y), batch_size=8, shards="4,2", seconds=0.1, devices="cpu:0,cpu:1", quiet=True,
        check=True, lr=0.1,
    )  # fmt: skip
    assert {row.split for row in found.rows} == {"data", "network", "layers"}
    assert all(row.measured_ms > 0 and row.predicted_ms > 0 for row in found.rows)
    assert found.recommended.command.startswith("lockstep.train(devices=")


class Odd(nn.Linear):
    """A layer whose forward pass does something else."""

    def __init__(self, change, inputs=8):
        super().__init__(inputs, 2)
        self.change = change

    def forward(self, X):
        return self.change(super().forward(X))


def raises(output):
    raise RuntimeError("no")


def small(model, **more):
    data = np.zeros((32, 8), np.float32), np.zeros(32, np.int64)
    settings = {"batch_size": 8, "shards": "4", "seconds": 0.1, "split": "data", "quiet": True}
    return lockstep.plan(model=model, data=data, **{"max_devices": 1, **settings, **more})


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Odd(raises), "cannot be measured: rank 0 .*RuntimeError: no"),
        (Odd(lambda output: output * float("nan")), "cannot be measured: the loss of its first batch is NaN"),
        (Odd(lambda output: output, inputs=9), "cannot be measured: .*shapes cannot be multiplied"),
        (Odd(lambda output: output.view(1, 2)), "cannot be measured: .*shape"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused_in_a_sentence(model, sentence):
    with pytest.raises(ConfigError, match=sentence) as found:
        small(model)
    assert "\n" not in str(found.value)


def test_a_number_of_shards_that_the_model_does_not_take_is_left_out():
    found = small(Odd(lambda output: output.view(2, 2)), shards=[4, 8], seconds=5)
    assert {row.configuration.num_shards for row in found.rows} == {4}
    assert any("--shards 8 is left out: rank 0" in note for note in found.notes)


def test_an_interrupt_waits_for_the_step_to_end():
    finished = []

    def interrupts(output):
        if not finished:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until it has arrived
        finished.append(True)
        return output

    with pytest.raises(Interrupted):
        small(Odd(interrupts), shards=1, seconds=60)
    assert finished


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"split": "network"}, "--split network cannot be planned: Linear is one layer by itself"),
        ({"split": "network", "exchange": "ring"}, "cannot be planned: .* does not go together with --exchange ring"),
        ({"exchange": "native"}, "--exchange native needs --engine processes"),
        ({"split": "data", "stages": "nowhere"}, "--stages nowhere cannot be planned for up to 2 devices"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        small(nn.Linear(8, 2), max_devices=2, **settings)


def test_what_does_not_go_together_with_a_split_leaves_it_out():
    found = small(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), max_devices=2, exchange="ring", split="auto")
    assert {row.split for row in found.rows} == {"data"}
    assert sum("does not go together with --exchange ring" in note for note in found.notes) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_devices": "two"}, "from 1 to 65536, got two"),
        ({"max_devices": 2.5}, "from 1 to 65536, got 2.5"),
        ({"max_devices": True}, "from 1 to 65536, got True"),
        ({"seconds": None}, "at least 0 and finite, got None"),
        ({"link": 25}, "--link 25 cannot be read"),
        ({"device_speed": (1, 2, 3)}, "has 3 numbers"),
        ({"device_memory": 16}, "Nothing fits"),
        ({"shards": [4, 99]}, "--shards 4,99 cannot be planned at '99'"),
    ],
)
def test_odd_values_from_python_are_refused_in_a_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        small(nn.Linear(8, 2), **options)


def test_shards_that_do_not_fit_on_a_gpu_have_no_whole_steps(monkeypatch, profile):
    """Fewer shards need more memory; the others are measured all the same."""

    @contextmanager
    def opened(config, prepared):
        if config.num_shards < 4:
            raise OutOfMemory(0, "cuda:0", 64, "Use more shards", "out of memory")
        yield SimpleNamespace(seconds_per_step=lambda num_steps: 0.01 * config.num_shards)

    monkeypatch.setattr(whole_steps, "opened_run", opened)
    gpu, config = Device("cuda:0"), RunConfig(batch_size=64)
    found = whole_steps.alone(config, gpu, (1, 2, 4, 8, 16), lambda config: None)
    assert found.points == ((4, 0.04), (8, 0.08), (16, 0.16))
    assert whole_steps.alone(config, gpu, (1, 2), lambda config: None) is None


def test_whole_steps_of_several_devices_correct_the_clock(monkeypatch, profile):
    asked = []

    @contextmanager
    def opened(config, prepared):
        asked.append((config.split, config.num_shards, config.stages, config.num_slices))
        yield SimpleNamespace(seconds_per_step=lambda: 1.0)

    monkeypatch.setattr(whole_steps, "opened_run", opened)
    profile = replace(profile, stages={("layer2",): profile.stage_costs(("layer2",))})
    pair = [Device("cpu:0"), Device("cpu:1")]
    left = iter([True] * 5 + [False])
    measured = Corrections(RunConfig(batch_size=64), (1, 2, 4, 8), lambda config: None, lambda: next(left))
    found = measured.of(profile, pair)
    assert asked == [
        ("data=2", 2, None, None),
        ("data=2", 8, None, None),
        ("network=2", 1, "layer2", None),
        ("network=2", 8, "layer2", None),
        ("layers=2", 1, None, 8),
    ]  # and no time for the last
    assert {key: [number for number, _ in curve.points] for key, curve in found.items()} == {
        (2, "data"): [2, 8], (2, "network"): [1, 8], (2, "layers"): [1],
    }  # fmt: skip
    predicted = plan(replace(profile, corrections=found), Hardware(), max_devices=2, shards=(8,)).rows
    found = [row.predicted_ms for row in predicted if row.configuration.num_devices == 2 and row.split != "layers"]
    assert found == pytest.approx([1000.0, 1000.0])


def uneven(profile, *seconds):
    """The profile with layers that take so many seconds for a sample, and send little."""

    def layer(known, passes):
        both = curve_of([(1, passes / 2), (64, 32 * passes)])
        return known._replace(forward=both, backward=both, sent_bytes=0.01)

    return replace(profile, layers=tuple(map(layer, profile.layers, seconds)))


@pytest.mark.parametrize("order", ["0,1", "1,0"])
def test_an_order_of_the_devices_that_suits_the_stages_better_is_said(profile, order):
    speeds = (3.0, 1.0) if order == "0,1" else (1.0, 3.0)
    slow_link = Hardware(speeds=speeds, is_shared=False, link=Link(bandwidth=2000.0))  # for gradients
    found = plan(uneven(profile, 0.0075, 0.0005, 0.001, 0.001), slow_link, 2, (8,))
    said = [note for note in found.notes if "in the order" in note]
    (row,) = [row for row in found.rows if row.split == "network"]
    if order == "0,1":
        assert said == []
        assert row is found.recommended
    else:
        other = plan(uneven(profile, 0.0075, 0.0005, 0.001, 0.001), slow_link._replace(speeds=(3.0, 1.0)), 2, (8,))
        milliseconds = f"{other.recommended.predicted_ms:,.1f} ms"
        assert (
            f"order 1,0 (from 0, as they are now), --split network --shards 8 --stages layer1 would take {milliseconds}"
            in said[0]
        )
        assert other.recommended.predicted_ms < 0.5 * row.predicted_ms


def test_an_order_of_the_devices_in_which_stages_fit_is_said(profile):
    first, *others = profile.layers
    first_is_large = replace(profile, layers=(first._replace(num_entries=1500), *others), sliced=None)
    memories = Hardware(is_shared=False, memories=(50_000.0, 66_000.0))
    message = r"Nothing fits .* as they are listed\. With the devices in the order 1,0 .* --stages layer1 would take"
    with pytest.raises(ConfigError, match=message):
        plan(first_is_large, memories, 2, (8,))
    rows = plan(first_is_large, memories._replace(memories=(66_000.0, 50_000.0)), 2, (8,)).rows
    assert [row.configuration.starts for row in rows if row.split == "network" and row.fits] == [("layer1",)]


def test_a_cut_is_found_for_the_shards_that_are_under_way(profile):
    """With gpipe each stage has all eight shards of 8 samples, with 1f1b the first has two and the last one."""
    starts = {}
    for order in ("1f1b", "gpipe"):
        memories = Hardware(is_shared=False, memories=(130_000.0, 220_000.0))
        large = replace(profile, kept_bytes=1e6)  # so that no device has room for the whole
        (row,) = [row for row in plan(large, memories, 2, (8,), pipeline=order).rows if row.split == "network"]
        assert row.fits
        starts[order] = row.configuration.starts
    assert starts == {"1f1b": ("layer2",), "gpipe": ("layer1",)}
