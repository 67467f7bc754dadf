"""What was measured of a run on the devices at hand: plain data, for the clock and for `plan`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from lockstep.analysis.curves import Curve, lower, sum_of_curves
from lockstep.analysis.loading import Loading
from lockstep.schedules.clock import Link

NO_LINK = Link()
IN_MEMORY = Loading()


class LayerCost(NamedTuple):
    """A layer, a block or a stage: seconds of its passes by samples of a shard, and what it holds."""

    name: str  # of its first layer
    forward: Curve
    backward: Curve
    num_entries: int  # of the flat parameter vector
    sent_bytes: float = 0.0  # that it hands to the next one, for each sample
    kept_bytes: float = 0.0  # of activations, until the backward pass, for each sample


class Sliced(NamedTuple):
    """The whole model with its layers in slices."""

    alone: Curve  # seconds of a shard, forward and backward, on one device
    shared: Curve  # and on each of two that share the layers, at the same time, with what they wait for each other
    num_gathers: int  # of a shard: collectives in mid-pass
    gathered_bytes: float  # that a rank hands to the others in all of them, for each sample


@dataclass(frozen=True)
class Profile:
    """Costs of one model with one batch size, in seconds; by samples of a shard where they depend on it."""

    device: str  # that it was measured on
    num_at_hand: int  # devices that this machine has
    batch_size: int
    num_entries: int  # of the flat parameter vector
    whole: Curve  # forward and backward pass of the whole model, with its samples
    add: float  # of two vectors, for each entry
    update: float  # for each entry
    step: Curve  # what the host needs for a step besides, by number of ranks
    together: dict[int, Curve] = field(default_factory=dict)  # the same passes, while so many ranks do them
    link: Link = NO_LINK  # between the devices at hand
    layers: tuple[LayerCost, ...] = ()  # empty: it cannot be cut
    stages: dict[tuple[str, ...], tuple[LayerCost, ...]] = field(default_factory=dict)  # measured cuts, by their starts
    sliced: Sliced | None = None
    whole_steps: Curve | None = None  # on one GPU, as they are in a run, by number of shards
    # of several devices at hand, by their number and the way of splitting: times the clock's, by number of shards
    corrections: dict[tuple[int, str], Curve] = field(default_factory=dict)
    loading: Loading = IN_MEMORY
    cut_link: Link | None = None  # for activations, where that differs
    engine: str = "inprocess"  # of several devices
    start: float = 0.0  # seconds until processes are connected
    kept_bytes: float = 0.0  # activations of the whole model, for each sample
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    problems: dict[str, str] = field(default_factory=dict)  # split -> why it could not be measured
    left_out: dict[int, str] = field(default_factory=dict)  # samples of a shard -> why they could not be

    def slowed(self, num_active: int, num_samples: float) -> float:
        """How many times as long work takes while so many ranks work on the devices at hand."""
        if num_active <= 1 or not self.together:
            return 1.0
        known = {1: 1.0, **{number: self._ratio(curve, num_samples) for number, curve in self.together.items()}}
        if num_active in known:
            return known[num_active]
        most = max(known)
        if num_active > most:  # cores, or a GPU, are shared from here on
            return known[most] * num_active / most
        below, above = max(n for n in known if n < num_active), min(n for n in known if n > num_active)
        return known[below] + (known[above] - known[below]) * (num_active - below) / (above - below)

    def of_whole_step(self, sizes: Sequence[int]) -> float:
        """What a step of one GPU takes, as a share of what its instructions take one by one; 1 where that is all.

        In a run they are launched ahead, or replayed as a CUDA graph.
        """
        if self.whole_steps is None:
            return 1.0
        others = (self.add * (len(sizes) - 1) + self.update) * self.num_entries + self.step.at(1)
        one_by_one = sum(map(self.whole.at, sizes)) + others
        return self.whole_steps.at(len(sizes)) / one_by_one if one_by_one > 0 else 1.0

    def correction(self, num_devices: int, kind: str, num_shards: int) -> float:
        """How many times as long as on the clock a step of so many devices at hand takes."""
        measured = [number for number, known in self.corrections if known == kind and number <= num_devices]
        return self.corrections[max(measured), kind].within(num_shards) if measured else 1.0

    def _ratio(self, together: Curve, num_samples: float) -> float:
        """How many times as long passes take together, between the sizes that were measured."""
        size = together.nearest(num_samples)
        return max(1.0, together.at(size) / self.whole.at(size))

    def stage_costs(self, starts: tuple[str, ...]) -> tuple[LayerCost, ...]:
        """The stages of a cut before these layers: as measured, or put together from layers."""
        if starts in self.stages:
            return self.stages[starts]
        names = [layer.name for layer in self.layers]
        cuts = [0, *(names.index(name) for name in starts), len(names)]
        return tuple(joined(self.layers[start:stop]) for start, stop in pairwise(cuts))


def joined(layers: tuple[LayerCost, ...]) -> LayerCost:
    """Layers one after the other as one."""
    return LayerCost(
        layers[0].name,
        sum_of_curves(layer.forward for layer in layers),
        sum_of_curves(layer.backward for layer in layers),
        sum(layer.num_entries for layer in layers),
        layers[-1].sent_bytes,
        sum(layer.kept_bytes for layer in layers),
    )


def quickest(one: Profile, other: Profile) -> Profile:
    """Of two measurements of the same, whatever was quicker: others on the machine only make it slower."""
    stages = {**other.stages, **one.stages}
    for starts in one.stages.keys() & other.stages.keys():
        stages[starts] = _quickest_layers(one.stages[starts], other.stages[starts])
    whole_steps = one.whole_steps
    if whole_steps is not None and other.whole_steps is not None:
        whole_steps = lower(whole_steps, other.whole_steps)
    sliced = one.sliced
    if sliced is not None and other.sliced is not None:
        alone, shared = lower(sliced.alone, other.sliced.alone), lower(sliced.shared, other.sliced.shared)
        sliced = sliced._replace(alone=alone, shared=shared)
    return replace(
        one,
        whole=lower(one.whole, other.whole),
        add=min(one.add, other.add),
        update=min(one.update, other.update),
        step=lower(one.step, other.step),
        together={number: lower(curve, other.together[number]) for number, curve in one.together.items()},
        link=min(one.link, other.link),
        layers=_quickest_layers(one.layers, other.layers),
        stages=stages,
        sliced=sliced,
        whole_steps=whole_steps,
    )


def _quickest_layers(one: tuple[LayerCost, ...], other: tuple[LayerCost, ...]) -> tuple[LayerCost, ...]:
    return tuple(
        a._replace(forward=lower(a.forward, b.forward), backward=lower(a.backward, b.backward))
        for a, b in zip(one, other, strict=False)
    )
