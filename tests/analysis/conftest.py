"""A profile that was never measured: ten milliseconds a sample in four layers, two of the cores shared."""

import pytest

from lockstep.analysis.curves import curve_of
from lockstep.analysis.profile import LayerCost, Profile, Sliced
from lockstep.schedules.clock import Link


def line(fixed, per_sample):
    return curve_of([(1, fixed + per_sample), (1000, fixed + 1000 * per_sample)])


def layer(number):
    return LayerCost(f"layer{number}", line(0, 0.001), line(0, 0.0015), 250, sent_bytes=100.0, kept_bytes=1000.0)


@pytest.fixture
def profile():
    return Profile(
        device="cpu:0",
        num_at_hand=2,
        batch_size=64,
        num_entries=1000,
        whole=line(0.0, 0.01),
        add=0.0,
        update=0.0,
        step=curve_of([(1, 0.0), (2, 0.0)]),
        together={2: line(0.0, 0.011)},
        link=Link(),
        layers=tuple(map(layer, range(4))),
        sliced=Sliced(line(0, 0.012), line(0, 0.008), num_gathers=8, gathered_bytes=500.0),
        kept_bytes=4000.0,
        parameter_bytes=4000,
        optimizer_bytes=8000,
    )
